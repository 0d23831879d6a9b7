"""An error that nobody foresaw is one sentence in a terminal: what failed, where its traceback is, what to do."""

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from workbench import __main__ as command_line
from workbench.base.command_line import BUG, COMMANDS, OUT_OF_MEMORY
from workbench.base.launch import launch
from workbench.base.paths import MODELS, ROOT
from workbench.base.unforeseen import ChildFailureError, describe
from workbench.gpus.emulator import command as emulator_command

SECRET = "nobody foresaw this"


@pytest.fixture(autouse=True)
def reports(tmp_path, monkeypatch):
    """The folder for files of tracebacks."""
    folder = tmp_path / "reports"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def raise_it(*_):
    raise KeyError(SECRET)


@pytest.mark.parametrize("name", COMMANDS)
def test_in_every_command_it_is_one_sentence_that_names_the_file(name, reports, monkeypatch, capsys):
    monkeypatch.setitem(command_line.COMMAND_FUNCTIONS, name, raise_it)
    words = COMMANDS[name]["example"].partition(" > ")[0].split()
    assert command_line.main(words) == BUG
    output = capsys.readouterr()
    (file,) = reports.iterdir()
    sentence = f"error: {name}: this is a bug of the workbench (KeyError: '{SECRET}'). The traceback is in {file}. "
    assert output.err == f"{sentence}Please report it, with the traceback.\n"
    assert output.out == ""
    report = file.read_text()
    assert report.startswith(f"workbench {name}")
    assert "\ntorch 2." in report
    assert "in raise_it" in report
    assert str(Path.home()) not in report


def test_the_emulators_own_command_does_the_same(reports, monkeypatch, capsys):
    monkeypatch.setattr(emulator_command, "emulate_as_asked", raise_it)
    assert emulator_command.emulate_by_itself(["--gpu", "t4", "--", "python", "train.py"]) == BUG
    assert f"(KeyError: '{SECRET}'). The traceback is in {reports}" in capsys.readouterr().err


def test_without_room_for_the_file_the_traceback_is_printed(reports, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(reports / "missing"))
    monkeypatch.setitem(command_line.COMMAND_FUNCTIONS, "list", raise_it)
    assert command_line.main(["list"]) == BUG
    printed = capsys.readouterr().err
    assert "in raise_it" in printed
    assert printed.splitlines()[-1].endswith("The traceback is above. Please report it, with the traceback.")


def test_a_full_memory_of_the_computer_is_no_bug(monkeypatch, capsys):
    def fill(_):
        raise MemoryError

    monkeypatch.setitem(command_line.COMMAND_FUNCTIONS, "list", fill)
    assert command_line.main(["list"]) == OUT_OF_MEMORY
    assert capsys.readouterr().err.startswith("error: this computer's memory is full. ")


def test_a_process_sends_the_sentence_and_a_note_with_the_traceback():
    with pytest.raises(ChildFailureError) as caught:
        launch(int, SECRET)
    assert str(caught.value).startswith(
        "this is a bug of the workbench (ValueError: invalid literal for int() with base"
    )
    assert "in reply_to" in caught.value.__notes__[0]
    assert describe(caught.value).is_bug


@pytest.fixture
def failing_model(tmp_path):
    """A folder with a model that can be built, and whose forward pass fails: 3 key heads do not divide 8 heads."""
    folder = tmp_path / "failing"
    LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=3, max_position_embeddings=128,
    ).save_pretrained(folder)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "gpt2-tiny" / name, folder / name)
    return folder


@pytest.mark.parametrize("command", ["run", "predict", "plan"])
def test_a_model_whose_own_forward_pass_fails_is_named_as_such(command, failing_model, capsys):
    options = ["--batch-size", "2", "--sequence-length", "32", "--steps", "2"]
    options += {"run": ["--device", "cpu"], "predict": ["--gpu", "t4"], "plan": ["--budget", "1GiB"]}[command]
    exit_code = command_line.main([command, f"random:{failing_model}", *options])
    printed = capsys.readouterr().err.splitlines()
    assert "the model's own forward pass failed in LlamaAttention.forward (RuntimeError: Number of heads" in printed[-1]
    assert "bug" not in printed[-1]
    assert exit_code in (1, 2)


def test_a_function_of_the_workbench_in_a_forward_pass_is_not_the_models():
    class Model(torch.nn.Module):
        def forward(self, name):
            return json.loads(name) if name == "[" else command_line.absolute(name)

    for name, is_bug in (("[", False), (None, True)):
        with pytest.raises((AttributeError, ValueError)) as caught:
            Model()(name)
        assert describe(caught.value).is_bug is is_bug


# ---- what was a traceback once ----

NOTEBOOKS = {
    "numbers": '{"cells": [1, 2]}',
    "nested": f'{{"cells": {"[" * 100_000}{"]" * 100_000}}}',
    "a long number": f'{{"cells": {"9" * 100_000}}}',
    "outputs": '{"cells": [{"outputs": [7, {"traceback": [1, null], "text": 5}]}]}',
    "no list": '{"cells": {"outputs": true}}',
}


@pytest.mark.parametrize("text", NOTEBOOKS.values(), ids=NOTEBOOKS)
def test_a_strange_notebook_has_no_message(text, tmp_path, capsys):
    path = tmp_path / "crash.ipynb"
    path.write_text(text)
    assert command_line.main(["doctor", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: message: there is no out-of-memory message in the text.")


def test_a_standard_input_that_cannot_be_read_is_named(monkeypatch, capsys):
    class Folder(io.BytesIO):
        def read(self, *_):
            raise IsADirectoryError(21, "Is a directory")

    for stdin, reason in ((None, "is closed"), (io.TextIOWrapper(Folder()), "cannot be read (Is a directory)")):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command_line.main(["doctor", "-"]) == 2
        expected = f"error: doctor: standard input {reason}. Give the name of a file in place of -.\n"
        assert capsys.readouterr().err == expected


def test_without_docstrings_the_command_line_has_its_help():
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "workbench", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("exit codes:\n  0  done", done.stdout)
