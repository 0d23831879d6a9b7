"""Predictions for GPUs: what they say, how techniques change them, and that nothing happens to the caller."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from typing import ClassVar

import numpy as np
import pytest
import torch

from workbench import Recipe, predict
from workbench.base import launch
from workbench.base.categories import Category, Phase, format_bytes
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.gpus.catalogue import GPUS
from workbench.gpus.emulator import call
from workbench.measure.timeline import LIVES
from workbench.prediction import predict as predict_module
from workbench.prediction import worker as prediction_worker
from workbench.prediction.predict import Prediction, predict_all
from workbench.prediction.prediction import list_fitting
from workbench.techniques import (
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Numerics,
    Technique,
)  # fmt: skip
from workbench.techniques.base import Call, Stage

MIB = 2**20
pytestmark = pytest.mark.usefixtures("predicted_once")


@pytest.fixture
def own_predictions(tmp_path, monkeypatch):
    """A folder in which nothing has been predicted; it is not there yet."""
    folder = tmp_path / "own"
    monkeypatch.setenv("WORKBENCH_RUNS", str(folder))
    return folder / "predictions"


@pytest.fixture(scope="session")
def small(model_name) -> Recipe:
    return Recipe(model=model_name, effective_batch_size=8, sequence_length=128, dropout=0.1)


@pytest.fixture(scope="session")
def gpt2() -> Recipe:
    return Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)


def test_categories_sum_to_the_peak_exactly(small):
    for technique in (GradientCheckpointing(), Lora(), MixedPrecision(), GradientAccumulation(steps=4)):
        predicted = predict(small | technique)
        peak = predicted.peak_allocated_bytes
        assert sum(predicted.by_category.values()) == peak
        assert predicted.by_phase[predicted.peak_phase] == peak == max(predicted.by_phase.values())
        assert predicted.peak_reserved_bytes >= peak
        assert all(predicted.maximum_by_category[name] >= now for name, now in predicted.by_category.items())


def test_weights_and_states_are_those_of_the_config(gpt2):
    """And the peak is named right, after a recomputation too."""
    found = predict(gpt2)
    parameters = 124_439_808  # Radford et al. (2019), the tied head counted once
    assert found.parameters == found.trainable_parameters == parameters
    assert found.by_category["weights"] == 4 * parameters
    assert found.maximum_by_category["gradients"] == 4 * parameters
    assert found.maximum_by_category["optimizer_states"] == pytest.approx(8 * parameters, rel=1e-4)
    logits = 8 * 1024 * 50257 * 4
    assert found.by_category["logits_and_loss"] == 3 * logits  # logits, log-softmax, its gradient
    last = "aten._log_softmax_backward_data.default"
    assert found.peak_operation == predict(gpt2 | GradientCheckpointing()).peak_operation == last


def test_flops_are_those_of_the_known_formula(gpt2):
    """Six per token and parameter of a matrix (Kaplan et al. 2020), and the attention's products."""
    tokens, layers, width, length = 8 * 1024, 12, 768, 1024
    matrices = 12 * layers * width**2 + 50257 * width
    # the attention's backward multiplies five times where its forward does twice: it recomputes the scores
    attention = (2 + 5) * 2 * layers * length * width
    assert predict(gpt2).flops == pytest.approx(tokens * (6 * matrices + attention), rel=0.001)


def test_recomputation_is_counted(gpt2):
    extra = predict(gpt2 | GradientCheckpointing()).flops / predict(gpt2).flops
    assert 1.15 < extra < 1.34  # the blocks' forward again, but not the head's


def test_techniques_lower_what_they_attack(small):
    base = predict(small).maximum_by_category
    for extra in (GradientCheckpointing(), Lora(), MixedPrecision(), GradientAccumulation(steps=4)):
        found = predict(small | extra).maximum_by_category
        for category in extra.attacks:
            assert found[category] < base[category], (extra.name, category)


def test_gelu_stays_in_fp32_under_cuda_autocast(gpt2):
    """`pow` is on CUDA's fp32 list and not on the CPU's; so less is saved than half."""
    on_gpu, on_cpu = (predict(gpt2 | MixedPrecision(), name) for name in ("h100", "cpu"))
    assert on_gpu.gpu == "h100"
    assert on_cpu.source == "predicted:cpu"
    assert on_cpu.peak_reserved_bytes is None
    share = on_gpu.maximum_by_category["activations"] / predict(gpt2).maximum_by_category["activations"]
    assert 0.7 < share < 0.95


def test_padding_brings_a_mask_in_each_layer(gpt2):
    plain, padded = predict(gpt2), predict(gpt2, padding=True)
    mask = 8 * 1024 * 1024 * 4
    more = padded.by_category["activations"] - plain.by_category["activations"]
    assert more == pytest.approx(12 * mask, rel=0.1)
    assert padded.padding
    assert not plain.padding


def test_fp16_has_its_scaler_and_less_activations(small):
    found = predict(small | MixedPrecision(dtype="fp16"))
    assert found.maximum_by_category["activations"] < predict(small).maximum_by_category["activations"]


def test_workspaces_depend_on_the_gpu(small):
    hopper, ampere = predict_all(small, ["h100", "a10"])
    assert hopper.workspace_bytes == 2 * GPUS["h100"].cublas_workspace_bytes == 64 * MIB
    assert ampere.workspace_bytes == 2 * GPUS["a10"].cublas_workspace_bytes
    difference = hopper.peak_allocated_bytes - ampere.peak_allocated_bytes
    assert difference == hopper.workspace_bytes - ampere.workspace_bytes


def test_fits_is_about_reserved_memory_and_context(small):
    found = predict(small, "t4")
    assert found.fits
    assert not dataclasses.replace(found, capacity_bytes=found.peak_reserved_bytes).fits
    exactly = found.peak_reserved_bytes + found.context_bytes
    assert dataclasses.replace(found, capacity_bytes=exactly).fits
    assert not dataclasses.replace(found, capacity_bytes=exactly - 1).fits


def test_a_step_too_large_is_still_told(gpt2):
    found = predict(gpt2, "rtx3070")
    assert not found.fits
    assert found.peak_reserved_bytes > found.capacity_bytes


def test_json_has_everything_but_the_timeline(small):
    found = predict(small)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["fits"] is True
    names = {field.name for field in dataclasses.fields(Prediction)}
    assert set(again) == names - {"timeline", "recipe_settings"} | {"recipe", "fits", "flops"}
    assert set(again["by_category"]) == {str(c) for c in Category}
    assert again["recipe_id"] == small.id
    assert again["recipe"] == small.to_dict()
    assert found.recipe == small


def test_timeline_is_the_live_bytes_of_tensors(small):
    found = predict(small)
    timeline = found.timeline
    assert timeline.live.shape == (len(Category), len(timeline.phases))
    assert (timeline.live >= 0).all()
    rounding = found.peak_allocated_bytes - int(timeline.total[timeline.peak(Phase(found.peak_phase))])
    assert 0 <= rounding < 0.1 * found.peak_allocated_bytes


# ---- cache ----


def test_a_second_question_is_answered_from_memory_and_a_third_from_disk(small, own_predictions, tmp_path, monkeypatch):
    first = predict(small)

    def refuse(*_):
        raise AssertionError("asked again")

    monkeypatch.setattr(predict_module, "ask_shadow", refuse)
    assert predict(small) == first
    shutil.copytree(own_predictions, tmp_path / "copied" / "predictions")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "copied"))
    again = predict(small)
    assert again is not first
    assert again == first
    np.testing.assert_array_equal(again.timeline.live, first.timeline.live)
    assert again.timeline.phases == first.timeline.phases
    assert again.timeline.operations == first.timeline.operations
    for name in LIVES:
        np.testing.assert_array_equal(again.timeline.lives[name], first.timeline.lives[name])


def test_a_damaged_file_is_predicted_anew(small, own_predictions, tmp_path, monkeypatch, subtests):
    first = predict(small)
    (whole,) = own_predictions.glob("*.npz")
    for damage in (b"", b"PK\x03\x04 cut off", b"no archive", whole.read_bytes()[:-100]):
        with subtests.test(damage=damage[:10]):
            damaged = tmp_path / str(len(damage)) / "predictions" / whole.name
            damaged.parent.mkdir(parents=True)
            damaged.write_bytes(damage)
            monkeypatch.setenv("WORKBENCH_RUNS", str(damaged.parents[1]))
            monkeypatch.setattr(predict_module, "ask_shadow", lambda *_, **__: [first])
            assert predict(small) == first
            assert damaged.stat().st_size > len(damage)


def test_padding_gpu_recipe_engine_and_versions_are_told_apart(small, own_predictions, monkeypatch):
    asked = []

    def answer(recipe, gpus, padding, ranks, **_):
        asked.append((recipe.label, *gpus, padding, ranks and str(ranks)))
        return [UnavailableError("not today")]

    def ask(recipe, gpu="h100", **options):
        with pytest.raises(UnavailableError, match="not today"):
            predict(recipe, gpu, **options)

    first = predict(small)
    monkeypatch.setattr(predict_module, "ask_shadow", answer)
    assert predict(small) == first
    ask(small, padding=True)
    ask(small, "a10")
    ask(small | Lora())
    ask(small, ranks=2)
    monkeypatch.setattr(predict_module, "versions", lambda: {"torch": "99"})
    ask(small)
    assert len(asked) == 5


def test_a_folder_that_cannot_be_written_to_is_no_failure(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file"))
    assert predict(small).peak_allocated_bytes > 0


# ---- the worker ----


@pytest.mark.dear
def test_nothing_changes_in_the_caller_and_the_worker_stays_warm_and_ends_with_it(small, own_predictions):
    """In a process of its own, which has not imported torch before, and where a CPU run shows what autocast does."""
    program = f"""
import sys, os
before = dict(os.environ), list(sys.path), set(sys.modules)
from workbench import Recipe, predict
from workbench.prediction import worker
from workbench.techniques import MixedPrecision
recipe = Recipe(model={small.model!r}, effective_batch_size=2, sequence_length=16) | MixedPrecision()
predicted = predict(recipe)
assert predicted.peak_allocated_bytes > 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
assert (dict(os.environ), list(sys.path)) == before[:2]
first = worker.SHADOWS.children["shadow"].process.pid
predict(recipe, padding=True)
assert worker.SHADOWS.children["shadow"].process.pid == first
import torch
with torch.autocast("cpu", dtype=torch.bfloat16):
    half = torch.ones(2, 2) @ torch.ones(2, 2)
    assert half.pow(2).dtype is torch.bfloat16  # CUDA's rule would say fp32
print(first)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


OWN = """
from dataclasses import dataclass
from workbench import Recipe, predict
from workbench.base.settings import setting
from workbench.techniques.base import Call, Numerics, Technique

def freeze(model, tensors):
    for parameter in list(model.parameters())[:tensors]:
        parameter.requires_grad_(False)
    return model

@dataclass(frozen=True)
class FreezeSome(Technique):
    tensors: int = setting(10, "how many", minimum=1)
    name, title, costs, numerics = "freeze_some", "Freeze some", "quality", Numerics.DIFFERENT

    def model(self, family):
        return Call(freeze, self.settings())

small = Recipe(model="gpt2-tiny", effective_batch_size=2, sequence_length=16)
print(predict(small | FreezeSome(), "t4").trainable_parameters, predict(small, "t4").trainable_parameters)
"""


@pytest.mark.dear
def test_a_technique_that_a_notebook_defines_is_predicted_and_its_next_definition_too(tmp_path):
    program = f"""
from IPython.core.interactiveshell import InteractiveShell
cell = InteractiveShell.instance().run_cell
cell({OWN!r}).raise_error()
cell({OWN.replace("[:tensors]", "[:-tensors]")!r}).raise_error()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )  # fmt: skip
    (some, whole), (less, same) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert less < some < whole == same, done.stderr


@pytest.mark.dear
def test_a_worker_that_died_is_replaced_and_one_that_cannot_work_says_why(small, own_predictions, monkeypatch):
    predict(small)
    worker = prediction_worker.SHADOWS.children["shadow"]
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    call.TRUNK.end()  # or it would be a fork of this
    with monkeypatch.context() as patch:
        cannot = "import sys; sys.stderr.write('no room'); sys.exit(1)  # {path} {modules}"
        patch.setattr(launch, "SERVE", cannot)
        with pytest.raises(RuntimeError, match="no room"):
            predict(small, padding=True)
        assert prediction_worker.SHADOWS.children == {}
    assert predict(small, padding=True).peak_allocated_bytes > 0
    assert prediction_worker.SHADOWS.children["shadow"] is not worker


def test_threads_may_ask_at_the_same_time(small, own_predictions):
    predicted: dict[str, Prediction] = {}

    def ask(name: str) -> None:
        predicted[name] = predict(small | Lora(rank=4), name)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("t4", "a10", "h100")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {name: prediction.gpu for name, prediction in predicted.items()} == {
        "t4": "t4",
        "a10": "a10",
        "h100": "h100",
    }


# ---- what cannot be predicted ----


def test_an_unknown_gpu_lists_the_known_ones(small):
    with pytest.raises(ConfigurationError, match="there is no 'titan'. Known: t4, l4"):
        predict(small, "titan")


def test_a_length_beyond_the_positions_is_refused(small):
    with pytest.raises(ConfigurationError, match="beyond the 128 positions"):
        predict(dataclasses.replace(small, sequence_length=256))


def test_bf16_is_refused_where_it_would_be_emulated_before_any_process_is_asked(small, monkeypatch):
    recipe = small | MixedPrecision(dtype="bf16")
    predict(recipe, "h100")
    monkeypatch.setattr(predict_module, "ask_shadow", lambda *_, **__: pytest.fail("a process was asked"))
    with pytest.raises(ConfigurationError, match="predict: mixed_precision=dtype:bf16 needs compute capability 8.0"):
        predict(recipe, "t4")


def read_values(model):
    model.transformer.h[1].mlp.act.register_forward_pre_hook(lambda module, inputs: float(inputs[0].sum()) and None)
    return model


def keep_more(model):
    model.register_buffer("more", torch.empty(3 * MIB, dtype=torch.uint8, device="meta"))
    return model


@dataclasses.dataclass(frozen=True)
class ReadsValues(Technique):
    """Its forward pass looks at a value, which a fake tensor does not have."""

    name: ClassVar[str] = "reads_values"
    title: ClassVar[str] = "Reads values"
    attacks: ClassVar[tuple[Category, ...]] = ()
    costs: ClassVar[str] = "nothing"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    stage: ClassVar[Stage] = Stage.WRAP

    def missing(self, device):
        return "this machine has no such device"

    def model(self, family):
        return Call(read_values)


@dataclasses.dataclass(frozen=True)
class StandsIn(ReadsValues):
    """The same, with a stand-in for predictions that keeps 3 MiB of weights."""

    name: ClassVar[str] = "stands_in"

    def stand_in(self):
        return _ThreeMebibytes()


@dataclasses.dataclass(frozen=True)
class _ThreeMebibytes(StandsIn):
    def model(self, family):
        return Call(keep_more)


def test_what_cannot_be_traced_is_named_with_its_module(small):
    with pytest.raises(ConfigurationError) as caught:
        predict(small | ReadsValues())
    assert "aten._local_scalar_dense" in str(caught.value)
    assert "transformer.h.1.mlp" in str(caught.value)
    assert "Measure it with `run`" in str(caught.value)


def test_a_stand_in_is_driven_instead_whatever_this_machine_lacks(small):
    more = predict(small | StandsIn()).by_category["weights"] - predict(small).by_category["weights"]
    assert more == 3 * MIB


# ---- as text ----


def test_the_report_shows_peak_categories_phases_and_gpus(gpt2):
    found = predict(gpt2)
    text = str(found)
    for words in ("predicted for NVIDIA H100", "not measured", "reserved", "logits and loss", "optimizer step", "█"):
        assert words in text
    needed = format_bytes(found.need_bytes)
    assert f"needs {needed} of 79.2 GiB ({format_bytes(found.peak_reserved_bytes)} reserved, about" in text
    gpus = {"h100": found, "rtx3070": predict(gpt2, "rtx3070"), "t4": ConfigurationError("no bf16")}
    lines = list_fitting(gpus).splitlines()
    assert lines[0].split() == ["fits", "on", "needs", "has", "(CUDA's", "context", "is", "counted)"]
    assert lines[1].split() == ["h100", *format_bytes(found.need_bytes).split(), "79.2", "GiB"]
    assert lines[2].strip() == "does not fit on  rtx3070"
    assert lines[3].strip() == "cannot run on    t4: no bf16"
