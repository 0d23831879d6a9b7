"""Which Python a command means, and that the card is made for the PyTorch of no other one."""

import json
import sys

import pytest

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.interpreter import ask_python, find_default_python, find_python_of, this_python
from workbench.gpus.emulator.launch import complete_command, emulate


@pytest.fixture
def other_python(tmp_path):
    """A program that answers as a Python with PyTorch 2.6 would."""
    facts = {
        "version": "3.10",
        "prefix": str(tmp_path),
        "torch_release": "2.6.0",
        "torch_folder": "/other/torch",
        "bitsandbytes_folder": "",
    }
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
    path.chmod(0o755)
    return path


def script(folder, first_line):
    path = folder / "start"
    path.write_text(f"{first_line}\nprint()\n")
    path.chmod(0o755)
    return [str(path), "train.py"]


def test_a_python_that_is_named_or_stands_in_a_scripts_first_line_is_asked(other_python, tmp_path, subtests):
    commands = {
        "named": [str(other_python), "train.py"],
        "first line": script(tmp_path, f"#!{other_python}"),
        "as pip writes a long path": script(tmp_path, f'#!/bin/sh\n\'\'\'exec\' "{other_python}" "$0" "$@"'),
    }
    for name, command in commands.items():
        with subtests.test(name=name):
            python = find_python_of(command)
            assert (python.executable, python.torch_release) == (str(other_python), "2.6.0")
            assert not python.is_this_one


def test_what_names_none_means_that_of_this_process(tmp_path, monkeypatch):
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    for command in (["sh", "train.sh"], ["no-such-program"], script(tmp_path, "#!/bin/sh")):
        assert find_python_of(command) is this_python()
    assert this_python().torch_release
    assert complete_command(["python", "train.py"], 1) == [sys.executable, "train.py"]


def test_an_activated_environment_with_a_pytorch_is_meant_by_python(other_python, tmp_path, monkeypatch):
    assert find_default_python({"VIRTUAL_ENV": str(tmp_path)}).torch_release == "2.6.0"
    assert find_default_python({"CONDA_PREFIX": str(tmp_path / "empty")}) is this_python()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    assert complete_command(["python", "train.py"], 1) == [str(other_python), "train.py"]
    assert complete_command(["python3.12", "train.py"], 1) == ["python3.12", "train.py"]


def test_what_does_not_answer_as_a_python_is_refused(tmp_path):
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 1\n")
    silent.chmod(0o755)
    for path in (silent, tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match=r"does not answer as a Python of 3.9 or newer.*--python"):
            ask_python(str(path))


@pytest.mark.usefixtures("emulator")
def test_a_program_that_starts_another_python_gets_no_pytorch_of_ours_without_a_word(capfd):
    if not place.python_path() or sys._base_executable == sys.executable:
        pytest.skip("PyTorch's CUDA build lies in this very environment, or this Python has no other one below it")
    emulation = emulate(["sh", "-c", f"{sys._base_executable} -c 'import torch'"], gpu("t4"))
    assert emulation.exit_status == 1
    complaint = capfd.readouterr().err
    assert "is another Python than the one that the card was made for" in complaint
    assert f"Name it: emulate --python {sys._base_executable}" in complaint
