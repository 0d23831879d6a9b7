import json
import os
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import verify as verify_module
from verify import (
    EMULATED_GRID,
    NO_ROOM,
    Check,
    as_text,
    default_grid,
    gpu_of,
    main,
    recipes,
    summary,
    verify,
)

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.base.launch import launch
from workbench.techniques import REGISTRY


def test_the_grid_is_large_and_varied():
    grid = recipes()
    assert len(grid) >= 30
    assert len({recipe.id for recipe in grid}) == len(grid)
    assert len({t.name for recipe in grid for t in recipe.techniques}) >= 8
    assert {recipe.model for recipe in grid} == {"random:gpt2", "random:gpt2-medium"}
    assert len({(r.effective_batch_size, r.sequence_length) for r in grid}) >= 6


def test_the_gpu_of_a_device(subtests):
    devices = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA L4": "l4", "Tesla T4": "t4"}
    for device, name in devices.items():
        with subtests.test(device=device):
            assert gpu_of(Device("cuda", device)) == name


def test_a_processor_is_the_cpu_whatever_its_name():
    assert gpu_of(Device("cpu", "a processor beside an A10 (cuda)", threads=2)) == "cpu"


def test_an_unknown_gpu_is_refused_with_the_cure():
    with pytest.raises(ConfigurationError, match="not in the table of GPUs. Name one that is like it: --gpu NAME"):
        gpu_of(Device("cuda", "Voodoo 2"))


def check(predicted, measured):
    return Check("x", "m", 1, 1, "id", predicted, None, measured_allocated_bytes=measured)


def test_the_summary_takes_signs_off_and_names_the_largest_underestimate():
    figures = summary([check(101, 100), check(97, 100), check(5, None)])
    assert figures["configurations"] == 3
    assert figures["measured"] == 2
    assert figures["allocated_mean"] == pytest.approx(0.02)
    assert figures["allocated_worst"] == pytest.approx(0.03)
    assert figures["allocated_most_under"] == pytest.approx(0.03)


@pytest.fixture
def grid(tmp_path, model_name):
    path = tmp_path / "grid.json"
    entries = [
        {"model": model_name, "batch": 4, "length": 32, "techniques": []},
        {"model": model_name, "batch": 4, "length": 32, "techniques": ["gradient_checkpointing", "lora=rank:2"]},
        {"model": model_name, "batch": 4, "length": 32, "techniques": ["mixed_precision=dtype:fp16"]},
    ]
    path.write_text(json.dumps(entries))
    return path


@pytest.mark.dear
def test_on_this_cpu_the_predictions_hold_and_the_command_goes_on_where_it_stopped(grid, tmp_path, monkeypatch, capsys):
    output = tmp_path / "verification.json"
    chosen = recipes(grid)
    first = verify(chosen[:1], gpu="cpu", device="cpu", output=output)
    with monkeypatch.context() as patch:
        patch.setattr(verify_module, "launch", lambda *_, **__: pytest.fail("measured again"))
        assert verify(chosen[:1], gpu="cpu", device="cpu", output=output) == first
    arguments = ["--device", "cpu", "--grid", str(grid), "--output", str(output)]
    assert main(arguments) == 1, "one of them cannot be measured on a CPU"
    written = json.loads(output.read_text())
    assert written["gpu"] == "cpu"
    assert written["summary"]["measured"] == 2
    assert written["summary"]["allocated_worst"] < 0.01
    assert "needs a GPU" in written["checks"][2]["remark"]
    assert "needs a GPU" in capsys.readouterr().out


@pytest.fixture
def predicting(monkeypatch):
    """Predictions that are made up."""
    predicted = SimpleNamespace(micro_batch_size=4, peak_allocated_bytes=100, peak_reserved_bytes=None, fits=True)
    monkeypatch.setattr(verify_module, "predict", lambda recipe, gpu, engine: predicted)
    return predicted


@pytest.fixture
def measuring(predicting, monkeypatch):
    """Processes that measure nothing: a recipe in `failing` fails. Returns what was asked for, and `failing`."""
    asked, failing = [], {}

    def measure_nothing(function, recipe, **_):
        asked.append(recipe)
        if recipe in failing:
            raise failing[recipe]
        return SimpleNamespace(peak_allocated_bytes=100, peak_reserved_bytes=120, tokens_per_s=7.0)

    monkeypatch.setattr(verify_module, "launch", measure_nothing)
    return asked, failing


CUDA_ERROR = RuntimeError("Traceback\nCUDA error")


def test_what_failed_is_tried_again_and_what_was_measured_is_not(grid, tmp_path, measuring):
    asked, failing = measuring
    output, (one, two, three) = tmp_path / "verification.json", recipes(grid)
    failing[two] = CUDA_ERROR
    first = verify([one, two, three], gpu="cpu", output=output)
    assert [check.remark for check in first] == ["", "CUDA error", ""]
    assert [row["remark"] for row in json.loads(output.read_text())["checks"]] == ["", "CUDA error", ""]
    failing.clear()
    asked.clear()
    second = verify([one, two, three], gpu="cpu", output=output)
    assert asked == [two]
    assert [check.measured_allocated_bytes for check in second] == [100, 100, 100]
    assert [check.measured_reserved_bytes for check in second] == [120, 120, 120]
    assert [check.tokens_per_s for check in second] == [7.0, 7.0, 7.0]
    verify([one, two, three], gpu="cpu", output=output)
    assert asked == [two]


def test_what_was_measured_stays_where_a_second_try_is_cut_off(grid, tmp_path, measuring):
    _, failing = measuring
    output, chosen = tmp_path / "verification.json", recipes(grid)
    failing[chosen[1]] = CUDA_ERROR
    verify(chosen, gpu="cpu", output=output)
    failing[chosen[1]] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        verify(chosen, gpu="cpu", output=output)
    kept = [check["recipe_id"] for check in json.loads(output.read_text())["checks"]]
    assert kept == [chosen[0].id, chosen[2].id]


@pytest.mark.usefixtures("measuring")
def test_what_was_measured_is_predicted_anew(grid, tmp_path, predicting):
    output, chosen = tmp_path / "verification.json", recipes(grid)
    verify(chosen, gpu="cpu", output=output)
    predicting.peak_allocated_bytes = 101
    assert [check.error for check in verify(chosen, gpu="cpu", output=output)] == [pytest.approx(0.01)] * 3


@pytest.mark.usefixtures("measuring")
def test_a_prediction_that_is_refused_is_a_row_with_the_reason(grid, tmp_path, monkeypatch):
    def refuse(recipe, gpu, engine):
        raise ConfigurationError("predict: no bf16")

    monkeypatch.setattr(verify_module, "predict", refuse)
    checks = verify(recipes(grid), gpu="t4", output=tmp_path / "verification.json")
    assert {(check.remark, check.error, check.measured_allocated_bytes) for check in checks} == {
        ("predict: no bf16", None, 100)
    }


def test_what_does_not_fit_is_a_row_that_says_so(grid, tmp_path, measuring):
    _, failing = measuring
    chosen = recipes(grid)[:1]
    failing[chosen[0]] = OutOfMemoryError("no room")
    (check,) = verify(chosen, gpu="cpu", output=tmp_path / "verification.json")
    assert (check.remark, check.measured_allocated_bytes) == (NO_ROOM, None)


def test_whether_it_fits_is_compared_too():
    room = Check("x", "m", 1, 1, "id", measured_allocated_bytes=100)
    none = replace(room, measured_allocated_bytes=None, remark=NO_ROOM)
    cases = [none, replace(none, predicted_fits=False), room, replace(room, predicted_fits=False)]
    words = [line.rpartition("x ")[2] for line in as_text(cases).splitlines()[1:5]]
    assert words[0] == "(DOES NOT FIT, WAS SAID TO FIT)"
    assert words[1] == "(does not fit, as predicted)"
    assert words[2].endswith(" x")
    assert words[3] == "(FITS, WAS SAID NOT TO)"


def test_an_emulated_gpu_has_a_grid_of_its_own_with_every_technique():
    assert default_grid("emulated:t4") == EMULATED_GRID
    assert default_grid("cuda") == default_grid(None) != EMULATED_GRID
    grid = recipes(EMULATED_GRID)
    assert len({recipe.id for recipe in grid}) == len(grid) >= 120
    # but for the one that is predicted by compiling it, under the emulator itself
    assert {technique.name for recipe in grid for technique in recipe.techniques} >= REGISTRY.keys() - {"torch_compile"}


@pytest.mark.usefixtures("predicting")
def test_every_run_is_a_process_of_its_own_that_ends_with_it(grid, tmp_path, monkeypatch):
    """CUDA, once started by an import, cannot be used in a child that is forked: these are started anew."""

    def say_which_process(function, *_, **__):
        return SimpleNamespace(peak_allocated_bytes=launch(os.getpid), peak_reserved_bytes=1, tokens_per_s=1)

    monkeypatch.setattr(verify_module, "launch", say_which_process)
    checks = verify(recipes(grid)[:2], gpu="cpu", device="cpu", output=tmp_path / "verification.json")
    processes = [check.measured_allocated_bytes for check in checks]
    assert len({*processes, os.getpid()}) == 3
    assert not any(psutil.pid_exists(process) for process in processes)


@pytest.mark.usefixtures("predicting")
def test_a_process_that_dies_is_a_row_with_its_last_words(grid, tmp_path, monkeypatch):
    nowhere = {"PYTHONHOME": "/nowhere"}
    monkeypatch.setattr(verify_module, "launch", lambda *a, **named: launch(*a, environment=nowhere, **named))
    (check,) = verify(recipes(grid)[:1], gpu="cpu", device="cpu", output=tmp_path / "verification.json")
    assert check.measured_allocated_bytes is None
    assert check.remark


def test_nothing_is_measured_where_a_launcher_started_it(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    output = tmp_path / "verification.json"
    with pytest.raises(ConfigurationError, match="WORLD_SIZE=2 in the environment says"):
        main(["--device", "cpu", "--output", str(output)])
    assert not output.exists()
