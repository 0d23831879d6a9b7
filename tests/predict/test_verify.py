import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from workbench.__main__ import main
from workbench.errors import ConfigurationError
from workbench.gpus.process import Worker
from workbench.predict import verify as verify_module
from workbench.predict.verify import (
    EMULATED_GRID,
    NO_ROOM,
    Check,
    default_grid,
    gpu_of,
    recipes,
    summary,
    verification_text,
    verify,
)
from workbench.run.world import World
from workbench.techniques import REGISTRY


def test_the_grid_is_large_and_varied():
    grid = recipes()
    assert len(grid) >= 30
    assert len({recipe.id for recipe in grid}) == len(grid)
    assert len({t.name for recipe in grid for t in recipe.techniques}) >= 8
    assert {recipe.model for recipe in grid} == {"random:gpt2", "random:gpt2-medium"}
    assert len({(r.effective_batch_size, r.sequence_length) for r in grid}) >= 6


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
    ],
)
def test_the_gpu_of_a_device(device, name):
    assert gpu_of(World(0, 1, "cuda", device, None)) == name


def test_a_processor_is_the_cpu_whatever_its_name():
    assert gpu_of(World(0, 1, "cpu", "a processor beside an A10 (cuda)", 2)) == "cpu"


def test_an_unknown_gpu_is_refused_with_the_cure():
    with pytest.raises(ConfigurationError, match="not in the table of GPUs. Name one that is like it: --gpu NAME"):
        gpu_of(World(0, 1, "cuda", "Voodoo 2", None))


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


def test_on_this_cpu_the_predictions_hold_and_the_command_goes_on_where_it_stopped(grid, tmp_path, monkeypatch, capsys):
    output = tmp_path / "verification.json"
    chosen = recipes(grid)
    first = verify(chosen[:1], gpu="cpu", device="cpu", output=output)
    monkeypatch.setattr(verify_module, "_measured", lambda *_: pytest.fail("measured again"))
    assert verify(chosen[:1], gpu="cpu", device="cpu", output=output) == first
    monkeypatch.undo()
    arguments = ["verify", "--device", "cpu", "--grid", str(grid), "--output", str(output)]
    assert main(arguments) == 1, "one of them cannot be measured on a CPU"
    found = json.loads(output.read_text())
    assert found["gpu"] == "cpu"
    assert found["summary"]["measured"] == 2
    assert found["summary"]["allocated_worst"] < 0.01
    assert "needs a GPU" in found["checks"][2]["remark"]
    assert "needs a GPU" in capsys.readouterr().out


@pytest.fixture
def measuring(monkeypatch):
    """Measurements that are made up: a recipe in `failing` fails. Returns what was asked for, and `failing`."""

    def measured(recipe, device):
        asked.append(recipe)
        check = Check(recipe.label, recipe.model, 4, recipe.sequence_length, recipe.id)
        if recipe in failing:
            return replace(check, remark="CUDA error")
        return replace(check, measured_allocated_bytes=100)

    asked, failing = [], []
    predicted = SimpleNamespace(micro_batch_size=4, peak_allocated_bytes=100, peak_reserved_bytes=None, fits=True)
    monkeypatch.setattr(verify_module, "predict", lambda recipe, gpu, engine: predicted)
    monkeypatch.setattr(verify_module, "_measured", measured)
    return asked, failing


def test_what_failed_is_tried_again_and_what_was_measured_is_not(grid, tmp_path, measuring):
    asked, failing = measuring
    output, (one, two, three) = tmp_path / "verification.json", recipes(grid)
    failing.append(two)
    first = verify([one, two, three], gpu="cpu", output=output)
    assert [check.remark for check in first] == ["", "CUDA error", ""]
    assert [row["remark"] for row in json.loads(output.read_text())["checks"]] == ["", "CUDA error", ""]
    failing.clear()
    asked.clear()
    second = verify([one, two, three], gpu="cpu", output=output)
    assert asked == [two]
    assert [check.measured_allocated_bytes for check in second] == [100, 100, 100]
    verify([one, two, three], gpu="cpu", output=output)
    assert asked == [two]


def test_what_was_measured_stays_where_a_second_try_is_cut_off(grid, tmp_path, measuring, monkeypatch):
    _, failing = measuring
    output, chosen = tmp_path / "verification.json", recipes(grid)
    failing.append(chosen[1])
    verify(chosen, gpu="cpu", output=output)

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_module, "_measured", cut_off)
    with pytest.raises(KeyboardInterrupt):
        verify(chosen, gpu="cpu", output=output)
    kept = [check["recipe_id"] for check in json.loads(output.read_text())["checks"]]
    assert kept == [chosen[0].id, chosen[2].id]


def test_what_was_measured_is_predicted_anew(grid, tmp_path, measuring, monkeypatch):
    output, chosen = tmp_path / "verification.json", recipes(grid)
    verify(chosen, gpu="cpu", output=output)
    better = SimpleNamespace(micro_batch_size=4, peak_allocated_bytes=101, peak_reserved_bytes=None, fits=True)
    monkeypatch.setattr(verify_module, "predict", lambda recipe, gpu, engine: better)
    assert [check.error for check in verify(chosen, gpu="cpu", output=output)] == [pytest.approx(0.01)] * 3


def test_a_prediction_that_is_refused_is_a_row_with_the_reason(grid, tmp_path, measuring, monkeypatch):
    def refuse(recipe, gpu, engine):
        raise ConfigurationError("predict: no bf16")

    monkeypatch.setattr(verify_module, "predict", refuse)
    found = verify(recipes(grid), gpu="t4", output=tmp_path / "verification.json")
    assert {(check.remark, check.error, check.measured_allocated_bytes) for check in found} == {
        ("predict: no bf16", None, 100)
    }


def test_whether_it_fits_is_compared_too():
    room = Check("x", "m", 1, 1, "id", measured_allocated_bytes=100)
    none = replace(room, measured_allocated_bytes=None, remark=NO_ROOM)
    cases = [none, replace(none, predicted_fits=False), room, replace(room, predicted_fits=False)]
    words = [line.rpartition("x ")[2] for line in verification_text(cases).splitlines()[1:5]]
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


def test_every_run_is_a_process_of_its_own_that_ends_with_it(recipe, monkeypatch):
    """CUDA, once started by an import, cannot be used in a child that is forked: these are started anew."""
    workers = []

    class Watched(Worker):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            workers.append(self)

        def call(self, function, *_, **__):
            return SimpleNamespace(peak_allocated_bytes=super().call(os.getpid), peak_reserved_bytes=1, tokens_per_s=1)

    monkeypatch.setattr(verify_module, "Worker", Watched)
    asked = [verify_module._measured(recipe, "cpu").measured_allocated_bytes for _ in range(2)]
    assert asked == [worker.process.pid for worker in workers]
    assert len({*asked, os.getpid()}) == 3
    assert not any(worker.alive() for worker in workers)


def test_a_process_that_dies_is_a_row_with_its_last_words(recipe, monkeypatch):
    monkeypatch.setattr(verify_module, "Worker", lambda *_, **named: Worker({"PYTHONHOME": "/nowhere"}, (), **named))
    found = verify_module._measured(recipe, "cpu")
    assert found.measured_allocated_bytes is None
    assert found.remark
