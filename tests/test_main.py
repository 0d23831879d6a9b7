"""The command line: what it prints, where, and its exit codes."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from workbench import __main__ as main_module
from workbench import __version__
from workbench.__main__ import main
from workbench.base.command_line import COMMANDS
from workbench.base.device import list_real_gpus
from workbench.journal.record import Status, read_all
from workbench.recipe import as_command
from workbench.techniques import REGISTRY, Lora
from workbench.training.trainer import MeteredTrainer


@pytest.fixture
def quick(model_name, text_file):
    return [model_name, "--corpus", str(text_file), "--steps", "4", "--sequence-length", "16", "--sample-tokens", "0"]


def test_run_prints_a_summary_with_samples_and_leaves_a_record_and_a_model(quick, capsys):
    options = ["--technique", "lora=rank:4,alpha:8", "--sample-tokens", "8", "--save", "merged"]
    assert main(["run", *quick, *options]) == 0
    (record,) = read_all()
    assert record.recipe.techniques == (Lora(rank=4, alpha=8.0),)
    out = capsys.readouterr().out
    for words in ("lora(rank=4, alpha=8.0)", "peak", "held out", "tokens/s", "before:", "after:", record.model_path):
        assert words in out
    assert record.id in out


def test_a_run_that_was_saved_is_reused_without_complaint(quick):
    saving = ["run", *quick, "--technique", "lora", "--save", "adapter"]
    assert main(saving) == 0
    assert main([*saving[:-2], "--reuse"]) == 0
    assert len(read_all()) == 1


def test_json_is_one_object_on_standard_output_and_equal_runs_are_reused_on_request(quick, capsys):
    assert main(["run", *quick, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["status"] == "ok"
    assert first["recipe"]["steps"] == 4
    assert main(["run", *quick, "--reuse", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == first["id"]
    assert len(read_all()) == 1


UNUSABLE = [
    (["--technique", "lora=rank:0"], "lora: rank must be an integer of at least 1, got 0"),
    (["--technique", "lora=rank:many"], "lora: rank must be an integer of at least 1, got 'many'"),
    (["--technique", "lora=size:3"], "lora has no setting 'size'. Known: rank"),
    (["--technique", "magic"], f"no technique 'magic'. Known: {', '.join(sorted(REGISTRY))}."),
    (["--technique", "gradient_accumulation=steps:3"], "cannot be split into 3"),
    (["--batch-size", "0"], "effective_batch_size must be an integer of at least 1 and at most 1048576, got 0"),
    (["--steps", "1.5"], "steps must be an integer"),
    (["--sequence-length", "4096"], "beyond the 128 positions"),
    (["--corpus", "missing.txt"], "there is no file 'missing.txt'"),
    (["--device", "tpu"], "'tpu' is not one of cuda, mps, cpu"),
    (["--memory-cap", "8"], "memory_cap: '8' is not an amount of memory. Write a number above zero and its unit"),
    (["--memory-cap", "8Gb"], "memory_cap: '8Gb' is not an amount of memory"),
    (["--save", "adapter"], "trains no adapter. Save it as 'merged', or add dora, ia3, lora, "),
    (["--sample-tokens", "5000"], "sample_tokens must be between 0 and"),
]


def test_what_cannot_be_used_is_said_in_one_line_without_a_record(quick, model_name, capsys, subtests):
    cases = [(["run", *quick, *options], message) for options, message in UNUSABLE]
    cases.append((["predict", model_name, "--gpu", "titan"], "gpu: there is no 'titan'. Known: t4"))
    for arguments, message in cases:
        with subtests.test(arguments=arguments):
            assert main(arguments) == 2
            captured = capsys.readouterr()
            assert captured.err.startswith("error: ")
            assert message in captured.err
            assert "Traceback" not in captured.err
            assert not captured.out
            assert read_all() == []


FIELD = "A field of TrainingArguments is --set arguments.weight_decay=VALUE."
UNKNOWN = [
    (["rum"], r"argument COMMAND takes no 'rum'\. Known: run, .*Did you mean run\?"),
    (["frontier", "gpt2"], r"frontier is no command since version 0\.4\. The panel has it, under What fits where\."),
    (["verify"], r"verify is no command since .* run tools/verify\.py\."),
    (["run", "--techniqe", "lora"], r"run takes no '--techniqe'.*Did you mean --technique\?"),
    (["run", "--weight-decay", "0.1"], rf"run takes no '--weight-decay'\. Known: --help, --corpus, .*{FIELD}"),
    (["run", "--weight-decay=0.1"], rf"run takes no '--weight-decay'\..*{FIELD}"),
    (["run", "gpt2-tiny", "gpt2"], r"run takes no 'gpt2'\. Known: .*, --json\."),
    (["list", "--jsno"], r"list takes no '--jsno'\. Known: --help, --gpus\."),
    (["script", "--flavour", "tlr"], r"argument --flavour takes no 'tlr'\. Known: trainer, trl\. Did you mean trl\?"),
]


def test_what_a_command_does_not_know_is_said_with_the_nearest_that_it_knows(capsys, subtests):
    for arguments, message in UNKNOWN:
        with subtests.test(arguments=arguments):
            assert main(arguments) == 2
            assert re.fullmatch(rf"error: [^\n]*{message}\n", capsys.readouterr().err)


def test_what_this_machine_cannot_run_has_its_own_exit_code(quick, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", *quick, "--technique", "mixed_precision=dtype:fp16"]) == 3
    assert "needs a GPU" in capsys.readouterr().err
    assert read_all()[0].status is Status.UNAVAILABLE
    assert main(["run", *quick, "--device", "cuda"]) == 3


def test_a_memory_cap_that_is_too_small_has_the_exit_code_of_too_little_memory(quick, capsys):
    assert main(["run", *quick, "--memory-cap", "4MiB"]) == 4
    assert "did not fit into the memory cap of 4.0 MiB" in capsys.readouterr().err
    (record,) = read_all()
    assert (record.status, record.memory_cap_bytes) == (Status.OOM, 4 * 2**20)
    assert main(["run", *quick, "--memory-cap", "400MiB"]) == 0
    assert "not timed" in capsys.readouterr().out


def test_a_diverged_run_does_not_look_like_success(quick, monkeypatch, capsys):
    from workbench.techniques.base import Call

    def spoil(trainer):
        inner = trainer.compute_loss
        trainer.compute_loss = lambda model, *a, **k: inner(model, *a, **k) * (float("nan") if model.training else 1)

    monkeypatch.setattr(Lora, "trainer", lambda self: Call(spoil))
    assert main(["run", *quick, "--technique", "lora"]) == 1
    assert "diverged" in capsys.readouterr().out


def test_list_names_every_technique_with_its_settings(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name, technique in REGISTRY.items():
        assert name in out
        for field in dataclasses.fields(technique):
            assert f"{name}={field.name}:" in out


def test_list_takes_names_and_guesses_what_was_meant(capsys):
    assert main(["list", "lora"]) == 0
    out = capsys.readouterr().out
    assert "lora=rank:8" in out
    assert "dora=" not in out
    assert main(["list", "lorra"]) == 2
    assert "Did you mean lora?" in capsys.readouterr().err


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[0] == f"gpt2-memory-workbench {__version__}"


def test_records_and_compare(quick, capsys, tmp_path):
    assert main(["records"]) == 0
    assert "No runs yet" in capsys.readouterr().out
    assert main(["compare"]) == 2
    main(["run", *quick])
    main(["run", *quick, "--technique", "gradient_checkpointing"])
    capsys.readouterr()
    assert main(["records"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["id", "begun", "status", "recipe", "model", "seed", "peak", "loss", "tokens/s"]
    assert [row.split()[0] for row in rows] == [record.id for record in read_all()]
    assert all(" MiB " in row and "NA" not in row for row in rows)  # too few steps to be timed
    assert main(["compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["gradient_checkpointing", "baseline"]
    assert main(["compare", "--save", str(tmp_path / "kept")]) == 0
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"comparison.csv", "memory.png"}
    for name in ("runs.parquet", "runs.csv"):
        assert main(["records", "--export", str(tmp_path / name)]) == 0
    assert len(pd.read_parquet(tmp_path / "runs.parquet")) == len(pd.read_csv(tmp_path / "runs.csv")) == 2
    assert main(["records", "--export", str(tmp_path / "runs.xls")]) == 2


def test_an_unknown_notebook_or_parameter_is_refused(capsys):
    assert main(["notebooks", "nope"]) == 2
    assert main(["notebooks", "lora", "-p", "stepz", "3"]) == 2
    assert "notebooks has no parameter 'stepz'" in capsys.readouterr().err


def test_help_is_light_and_teaches():
    """No torch is imported for it, and it shows examples and exit codes."""
    code = "import sys, runpy; sys.argv = ['workbench', '--help']; runpy.run_module('workbench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout
    assert "exit codes:" in done.stdout
    assert " torch\n" not in done.stderr


def test_the_help_of_each_command_has_an_example_that_can_be_typed(capsys, subtests):
    for command, described in COMMANDS.items():
        with subtests.test(command=command):
            with pytest.raises(SystemExit):
                main([command, "--help"])
            (example,) = capsys.readouterr().out.split("example: python -m workbench ")[1:]
            assert example.split() == described["example"].split()
            arguments = shlex.split(described["example"].partition(" > ")[0])
            assert arguments[0] == command
            main_module._parser().parse_args(arguments)


@pytest.fixture
def recipe_file(model_name, text_file, tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'model = "{model_name}"\ncorpus = "{text_file}"\nsteps = 2\nsequence_length = 16\n'
        "[technique.lora]\nrank = 4\n[arguments]\nweight_decay = 0.1\n",
        encoding="utf-8",
    )
    return str(path)


def test_run_takes_a_recipe_file_and_what_is_given_beside_it_goes_over(recipe_file, model_name, capsys):
    changes = ["--set", "technique.lora.alpha=32", "--set", "arguments.lr_scheduler_type=cosine", "--set", "steps=9"]
    assert main(["run", recipe_file, *changes, "--steps", "2", "--sample-tokens", "0"]) == 0
    assert "lora(rank=4, alpha=32.0)" in capsys.readouterr().out
    (record,) = read_all()
    assert (record.recipe.model, record.recipe.steps, record.steps_done) == (model_name, 2, 2)
    assert record.recipe.arguments == {"weight_decay": 0.1, "lr_scheduler_type": "cosine"}


def test_the_command_of_a_record_repeats_it(recipe_file):
    assert main(["run", recipe_file, "--sample-tokens", "0"]) == 0
    command = shlex.split(as_command(read_all()[0].recipe))
    assert main([*command[3:], "--sample-tokens", "0", "--reuse"]) == 0
    assert len(read_all()) == 1


TAKE_A_FILE = {  # what their output says of the recipe
    "predict FILE --gpu t4 --json": "lora",
    "plan FILE --budget 1GiB --gpu t4 --json": "lora",
    "script FILE": "weight_decay=0.1",
}


@pytest.mark.usefixtures("predicted_once")
def test_every_command_takes_the_file_in_the_place_of_a_model(recipe_file, capsys, subtests):
    for command, words in TAKE_A_FILE.items():
        with subtests.test(command=command):
            assert main([recipe_file if word == "FILE" else word for word in command.split()]) == 0
            out = capsys.readouterr().out
            assert words in out
            answer = json.loads(out) if "--json" in command else {}
            recipe = answer.get("recipe") or answer.get("baseline", {}).get("recipe") or {}
            assert recipe.get("arguments", {"weight_decay": 0.1}) == {"weight_decay": 0.1}


@pytest.mark.usefixtures("predicted_once")
def test_check_and_scan_take_it_too(recipe_file, tmp_path, capsys):
    budget = tmp_path / "budget.toml"
    budget.write_text(f'[mine]\nlimit = "1GiB"\ngpu = "t4"\nrecipe = "{recipe_file}"\n', encoding="utf-8")
    assert main(["check", str(budget)]) == 0
    assert "within its limit" in capsys.readouterr().out
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "word " * n}) + "\n" for n in range(1, 40)), encoding="utf-8")
    scan = ["scan", str(rows), "--model", recipe_file, "--gpu", "t4", "--json"]
    assert main([*scan, "--set", "seed=3", "--set", "effective_batch_size=2"]) == 0
    found = json.loads(capsys.readouterr().out)["recipe"]
    assert (found["seed"], found["effective_batch_size"], found["corpus"]) == (3, 2, str(rows))
    assert found["techniques"]["lora"]["rank"] == 4
    assert main([*scan, "--seed", "5"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["seed"] == 5


SAID_BEFORE_TORCH_LOADS = {
    "run --device gpu": "device: 'gpu' is not one of cuda, mps, cpu, emulated:GPU.",
    "run missing.toml": "missing.toml cannot be read",
    "run --set steps": "--set: 'steps' is not NAME=VALUE",
    "run --set stepz=3": "Did you mean steps?",
    "run --set technique.lora.rank=many": "lora: rank must be an integer of at least 1, got 'many'",
    "run --set arguments.bf16=true": "arguments cannot have bf16. Use the technique mixed_precision",
    "predict --set callbacks=x": "callbacks are named 'package.module:Class'",
}
COMMANDS_IN_TURN = """
import sys
from workbench.__main__ import main
for command in sys.argv[1:]:
    try:
        exit_code = main(command.split())
    except SystemExit as end:  # of --version and --help
        exit_code = end.code
    print(exit_code, "torch" in sys.modules, file=sys.stderr)
"""


def test_what_is_wrong_in_an_option_or_a_file_is_said_before_torch_loads(subtests):
    """All of them in one process, which has not loaded it in the end."""
    program = [sys.executable, "-c", COMMANDS_IN_TURN, *SAID_BEFORE_TORCH_LOADS]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    errors = lines[::2]
    assert lines[1::2] == ["2 False"] * len(SAID_BEFORE_TORCH_LOADS)
    assert done.stdout == ""
    for error, (command, message) in zip(errors, SAID_BEFORE_TORCH_LOADS.items(), strict=True):
        with subtests.test(command=command):
            assert message in error


def test_what_is_looked_up_needs_no_torch(tmp_path):
    crash = tmp_path / "crash.log"
    crash.write_text("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB")
    commands = ["--version", "--help", "list", "list lora", "list --gpus", "list --gpus t4 h100", f"doctor {crash}"]
    program = [sys.executable, "-c", COMMANDS_IN_TURN, *commands]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["0 False"] * len(commands)
    assert "\nh100 " in done.stdout


def test_an_unknown_gpu_is_not_listed(capsys):
    assert main(["list", "--gpus", "t5"]) == 2
    assert "there is no 't5'" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(quick, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(MeteredTrainer, "training_step", stop)
    assert main(["run", *quick]) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")
    (record,) = read_all()
    assert record.status is Status.INTERRUPTED


@pytest.mark.usefixtures("predicted_once")
def test_predict_prints_a_table_and_the_gpus_it_fits_on(model_name, capsys):
    assert main(["predict", model_name, "--batch-size", "4", "--sequence-length", "64", "--technique", "lora"]) == 0
    out = capsys.readouterr().out
    for words in ("lora on random:", "4 × 64 tokens", "predicted for NVIDIA H100", "backward", "fits on", "rtx3060"):
        assert words in out


@pytest.mark.usefixtures("predicted_once")
def test_predict_prints_one_json_object(model_name, capsys):
    assert main(["predict", model_name, "--sequence-length", "64", "--gpu", "a10", "--padding", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpu"] == "a10"
    assert found["padding"] is True
    assert found["peak_allocated_bytes"] == sum(found["by_category"].values()) == max(found["by_phase"].values())


@pytest.mark.usefixtures("predicted_once")
def test_predict_needs_no_hub_for_the_known_sizes(capsys, monkeypatch):
    monkeypatch.setattr("workbench.models.source.model_files", lambda *_, **__: pytest.fail("asked the hub"))
    assert main(["predict", "gpt2", "--batch-size", "1", "--sequence-length", "512", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 124_439_808


def test_beside_the_version_the_environment_is_told_without_the_users_home(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    _, *lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines)
    assert told["torch"] == torch.__version__
    assert told["workbench"] == __version__
    assert told["processor"].endswith(f", {os.cpu_count()} cores")
    assert told["gpus"] == ("; ".join(list_real_gpus()) or "none that nvidia-smi lists")
    assert told["emulator"] in ("set up", "not set up")
    assert told["records"].endswith("runs")
    assert str(Path.home()) not in "".join(told.values())
