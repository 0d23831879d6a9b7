"""The engine that is no model: a prediction by PyTorch's own allocator, on an emulated GPU."""

from dataclasses import replace

import pytest

from workbench import Recipe
from workbench.errors import ConfigurationError, UnavailableError
from workbench.gpus import process
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import call, place
from workbench.gpus.process import Fork
from workbench.measure.categories import Category, Phase
from workbench.predict import predict as module
from workbench.predict import worker as prediction_worker
from workbench.predict.predict import CPU, EMULATOR, SHADOW, engine_for, predict
from workbench.predict.report import prediction_text
from workbench.run.run import run
from workbench.techniques import (
    ActivationOffloading,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    Padding,
    PromptTuning,
    Qlora,
    SelectiveCheckpointing,
    StepInBackward,
)

pytestmark = [pytest.mark.xdist_group("emulated"), pytest.mark.usefixtures("emulator")]  # one warm process for all

SMALL = Recipe(model="gpt2-tiny", effective_batch_size=4, sequence_length=64, steps=4)
LARGE = Recipe(model="random:gpt2", effective_batch_size=8, sequence_length=1024, steps=4)


@pytest.mark.parametrize(
    "recipe",
    [
        LARGE,
        LARGE | GradientCheckpointing(),
        LARGE | MixedPrecision(dtype="fp16") | Lora(),
    ],
    ids=lambda recipe: recipe.label,
)
def test_it_is_what_a_run_on_the_same_card_needs(recipe, tmp_path):
    """The prediction has no weights and no text; a run on the emulated card has both. Bytes are the same."""
    predicted = predict(recipe, "h100", engine=EMULATOR)
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert predicted.peak_reserved_bytes == record.peak_reserved_bytes
    assert predicted.peak_allocated_bytes == pytest.approx(record.peak_allocated_bytes, rel=1e-4)
    assert predicted.peak_phase == record.peak_phase
    assert predicted.source == record.memory_source == "emulated:h100"


def test_where_lengths_differ_the_longest_example_sets_the_peak(tmp_path):
    """In every batch of the first steps: a run meets it when the optimizer has its states."""
    recipe = replace(LARGE, effective_batch_size=4, sequence_length=512) | Padding()
    predicted = predict(recipe, "h100", engine=EMULATOR)
    usual = run(replace(recipe, steps=12), device="emulated:h100", folder=tmp_path)
    first = run(replace(recipe, steps=3), device="emulated:h100", longest_first=True, folder=tmp_path)
    assert predicted.padding
    assert predicted.peak_allocated_bytes == pytest.approx(first.peak_allocated_bytes, rel=1e-5)
    assert predicted.peak_reserved_bytes == first.peak_reserved_bytes
    assert predicted.peak_allocated_bytes >= usual.peak_allocated_bytes - 1024


def test_the_parts_sum_to_the_peak_and_say_what_they_are():
    found = predict(LARGE, "h100", engine=EMULATOR)
    assert sum(found.by_category.values()) == found.peak_allocated_bytes == max(found.by_phase.values())
    assert found.by_category[Category.WEIGHTS] == 4 * 124_439_808
    assert (
        found.workspace_bytes == 2 * gpu("h100").cublas_workspace_bytes
    )  # of the forward pass and of autograd's thread
    assert found.peak_operation == "aten._log_softmax_backward_data.default"
    assert found.work == pytest.approx(predict(LARGE, "h100", engine=SHADOW).work, rel=0.001)
    assert found.parameters == found.trainable_parameters == 124_439_808
    assert found.timeline.total.max() <= found.peak_allocated_bytes
    assert "PyTorch's allocator on an emulated GPU, not measured" in prediction_text(found)


def test_an_evaluation_that_peaks_has_its_parts_too():
    """Short padded examples, nothing kept for the backward pass: the held-out blocks need more."""
    recipe = replace(LARGE, effective_batch_size=4) | GradientCheckpointing() | Padding()
    found = predict(recipe, "h100", engine=EMULATOR)
    assert found.peak_phase == Phase.EVALUATION
    assert found.by_category[Category.WEIGHTS] == 4 * 124_439_808
    assert found.by_category[Category.UNATTRIBUTED] < 0.1 * found.peak_allocated_bytes


def test_micro_batches_in_between_are_not_trained_but_are_on_the_card(tmp_path):
    recipe = replace(LARGE, effective_batch_size=16) | GradientAccumulation(steps=8)
    predicted = predict(recipe, "h100", engine=EMULATOR)
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert predicted.peak_reserved_bytes == record.peak_reserved_bytes
    assert predicted.peak_allocated_bytes == pytest.approx(record.peak_allocated_bytes, rel=1e-5)
    assert predicted.gradient_accumulation_steps == 8
    assert predicted.work == pytest.approx(predict(recipe, "h100", engine=SHADOW).work, rel=0.002)


def test_learned_tokens_are_moved_to_the_card_once():
    """PEFT holds the embeddings under a second name."""
    plain, tuned = (predict(recipe, "h100", engine=EMULATOR) for recipe in (SMALL, SMALL | PromptTuning()))
    assert tuned.by_category[Category.WEIGHTS] < 1.05 * plain.by_category[Category.WEIGHTS]


def test_a_recipe_that_does_not_fit_has_its_numbers_all_the_same():
    """And leaves nothing behind: the next one is as before."""
    roomy, tight = (predict(LARGE, name, engine=EMULATOR) for name in ("rtx3090", "rtx3070"))
    assert roomy.fits
    assert not tight.fits
    assert tight.peak_reserved_bytes > gpu("rtx3070").memory_bytes
    assert tight.peak_allocated_bytes == roomy.peak_allocated_bytes
    small = predict(SMALL, "rtx3070", engine=EMULATOR)
    assert small.fits
    assert small.peak_reserved_bytes < 200 * 2**20


def test_quantized_weights_are_those_of_the_library():
    plain, packed = (predict(recipe, "h100", engine=EMULATOR) for recipe in (SMALL | Lora(), SMALL | Qlora()))
    assert packed.by_category[Category.WEIGHTS] < plain.by_category[Category.WEIGHTS]


def test_eight_bit_states_are_those_of_the_library():
    plain, small = (
        predict(recipe, "h100", engine=EMULATOR) for recipe in (LARGE, LARGE | Optimizer(kind="adamw_8bit"))
    )
    states = Category.OPTIMIZER_STATES
    # the embeddings' states stay in 32 bits, as the Trainer asks
    assert 0.3 < small.maximum_by_category[states] / plain.maximum_by_category[states] < 0.55


def test_padding_is_an_input_too():
    plain, padded = predict(LARGE, engine=EMULATOR), predict(LARGE, padding=True, engine=EMULATOR)
    mask = 8 * 1024 * 1024 * 4
    assert not plain.padding
    assert padded.padding
    assert padded.peak_allocated_bytes - plain.peak_allocated_bytes > 0.9 * mask


def test_what_the_card_cannot_do_is_refused_as_a_run_refuses_it():
    with pytest.raises(ConfigurationError, match="predict: mixed_precision=dtype:bf16 needs compute capability 8.0"):
        predict(SMALL | MixedPrecision(dtype="bf16"), "t4", engine=EMULATOR)


def test_a_length_beyond_the_model_is_refused():
    with pytest.raises(ConfigurationError, match="sequence_length"):
        predict(replace(SMALL, sequence_length=4096), "t4", engine=EMULATOR)


def test_the_engines_agree_on_what_fits():
    shadow, exact = (predict(LARGE | GradientCheckpointing(), "t4", engine=engine) for engine in (SHADOW, EMULATOR))
    assert shadow.source == "predicted:t4"
    assert exact.peak_allocated_bytes == pytest.approx(shadow.peak_allocated_bytes, rel=0.01)
    assert exact.fits == shadow.fits


# ---- which engine ----


def test_the_emulator_is_taken_where_it_is_set_up(monkeypatch):
    monkeypatch.delenv("WORKBENCH_ENGINE", raising=False)
    assert engine_for("t4") == EMULATOR
    assert engine_for("cpu") == SHADOW
    monkeypatch.setattr(place, "is_set_up", lambda: False)
    assert engine_for("t4") == SHADOW


def test_the_engine_can_be_named(monkeypatch):
    monkeypatch.setenv("WORKBENCH_ENGINE", SHADOW)
    assert engine_for("t4") == SHADOW
    assert engine_for("t4", EMULATOR) == EMULATOR
    monkeypatch.setenv("WORKBENCH_ENGINE", EMULATOR)
    assert engine_for("cpu") == SHADOW
    with pytest.raises(ConfigurationError, match="predict: engine 'oracle' is not one of emulator, shadow"):
        engine_for("t4", "oracle")
    with pytest.raises(ConfigurationError, match="predict: the emulator plays GPUs"):
        engine_for("cpu", EMULATOR)


def test_asked_for_and_not_set_up_it_says_how(monkeypatch):
    def missing():
        raise UnavailableError("emulator: not here. make emulator")

    monkeypatch.setattr(place, "stub_folder", missing)
    with pytest.raises(UnavailableError, match="make emulator"):
        predict(SMALL, "t4", engine=EMULATOR)


def test_each_engine_has_predictions_of_its_own(monkeypatch):
    keys = {module._key(SMALL, "t4", False, None, engine) for engine in module.ENGINES}
    assert len(keys) == 2


def test_a_shadow_that_is_a_fork_of_the_emulators_process_casts_the_same():
    prediction_worker.SHADOWS.end()
    call.start_process(gpu("t4"), prediction_worker.ON_CARD)
    asked = SMALL | MixedPrecision("fp16") | Lora(), ["t4", "h100", CPU], False
    forked = prediction_worker.ask(*asked)
    assert isinstance(prediction_worker.SHADOWS.workers["shadow"], Fork)
    prediction_worker.SHADOWS.end()
    call.TRUNK.end()
    alone = prediction_worker.ask(*asked)
    assert [replace(one, versions={}) for one in alone] == [replace(one, versions={}) for one in forked]
    assert not isinstance(prediction_worker.SHADOWS.workers["shadow"], Fork)


def test_where_nothing_can_be_forked_each_card_has_a_process_of_its_own(monkeypatch):
    def refused(pid):
        raise OSError(38, "Function not implemented")

    forked = predict(replace(SMALL, steps=8), "t4", engine=EMULATOR)
    call.PROCESSES.end()
    monkeypatch.setattr(process.os, "pidfd_open", refused)
    alone = predict(replace(SMALL, steps=9), "t4", engine=EMULATOR)
    assert not isinstance(call.PROCESSES.workers["t4"], Fork)
    assert alone.by_category == forked.by_category
    call.PROCESSES.end()


@pytest.mark.parametrize("partners", [(), (MixedPrecision(dtype="fp16"), Lora()), (Lora(dropout=0.1),)], ids=len)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_selective_checkpointing_keeps_is_the_same_in_both_engines(partners, dropout):
    recipe = replace(LARGE, effective_batch_size=2, dropout=dropout, techniques=partners) | SelectiveCheckpointing()
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert shadow.peak_reserved_bytes == pytest.approx(real.peak_reserved_bytes, rel=0.02)
    kept = [prediction.maximum_by_category["activations"] for prediction in (real, shadow)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4)
    assert shadow.work == pytest.approx(real.work, rel=0.001)


@pytest.mark.parametrize("partners", [(), (GradientCheckpointing(),), (MixedPrecision(dtype="fp16"), Lora())], ids=len)
def test_overlapped_copies_are_the_same_in_both_engines_and_in_a_run(partners, tmp_path):
    recipe = replace(LARGE, effective_batch_size=2, techniques=partners) | ActivationOffloading(overlap=True)
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert record.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert shadow.peak_reserved_bytes == pytest.approx(record.peak_reserved_bytes, rel=0.02)
    waiting = predict(replace(LARGE, effective_batch_size=2, techniques=partners) | ActivationOffloading(), "h100")
    two = 2 * 2 * 50257 * 768  # one that leaves and one that comes: at most the head in 16 bits, which autocast made
    assert shadow.peak_allocated_bytes == pytest.approx(waiting.peak_allocated_bytes, abs=two)


@pytest.mark.parametrize("partners", [(), (StepInBackward(),), (MixedPrecision(dtype="fp16"), Lora())], ids=len)
def test_muons_products_are_scratch_in_both_engines(partners):
    recipe = replace(LARGE, effective_batch_size=1, techniques=partners) | Optimizer(kind="muon")
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, abs=4096)
    assert shadow.by_phase["optimizer_step"] == pytest.approx(real.by_phase["optimizer_step"], abs=4096)
    states = [prediction.maximum_by_category["optimizer_states"] for prediction in (real, shadow)]
    assert states[0] == states[1]
    assert shadow.work == pytest.approx(real.work, rel=0.001)


@pytest.mark.parametrize("techniques", [(), (GradientAccumulation(steps=4),), (MixedPrecision(dtype="bf16"), Lora())])
def test_every_phase_is_the_same_in_both_engines_and_in_a_run_to_the_byte(techniques, tmp_path):
    recipe = replace(LARGE, steps=3, techniques=techniques)
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert dict(record.by_phase) == real.by_phase == shadow.by_phase
    assert record.peak_reserved_bytes == real.peak_reserved_bytes


@pytest.mark.parametrize("kind", ["adamw_paged", "adamw_8bit_paged"])
def test_states_in_unified_memory_are_on_the_host_in_both_engines(kind, tmp_path):
    recipe = LARGE | GradientCheckpointing() | Optimizer(kind=kind)
    real, shadow = (predict(recipe, "t4", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.by_phase == real.by_phase
    states = [prediction.maximum_by_category["optimizer_states"] for prediction in (real, shadow)]
    assert states[0] == states[1] < 4_000_000
    bytes_each = 2 if kind == "adamw_8bit_paged" else 8
    record = run(recipe, device="emulated:t4", folder=tmp_path)
    assert record.peak_host_bytes > bytes_each * 0.99 * record.parameters
    assert record.maximum_by_category["optimizer_states"] < 0.01 * record.peak_host_bytes


ON_HOST = Optimizer(kind="adamw_on_host")


@pytest.mark.parametrize(
    "techniques",
    [
        (ON_HOST,),
        (ON_HOST, StepInBackward(), GradientCheckpointing(offload=True)),
        (ON_HOST, MixedPrecision(dtype="bf16"), Lora()),
        (GradientCheckpointing(offload=True, every_n_layers=3), MixedPrecision(dtype="fp16"), Lora()),
        (GradientCheckpointing(offload=True, use_reentrant=True), ChunkedCrossEntropy()),
    ],
    ids=lambda techniques: replace(LARGE, techniques=techniques).label,
)
def test_what_the_libraries_keep_on_the_host_is_the_same_in_both_engines_and_in_a_run(techniques, tmp_path):
    recipe = replace(LARGE, effective_batch_size=2, steps=3, techniques=techniques)
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert record.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert shadow.peak_reserved_bytes == pytest.approx(real.peak_reserved_bytes, rel=0.02)
    assert record.peak_reserved_bytes == real.peak_reserved_bytes
    if ON_HOST in techniques:  # weights, gradients and two states, of all but the smallest tensors
        assert record.peak_host_bytes == pytest.approx(16 * record.trainable_parameters, rel=0.01)


def test_a_step_on_the_host_is_not_computed():
    """For GPT-2 XL it would fill 25 GB of this machine's memory."""
    found = predict(replace(LARGE, model="random:gpt2-xl") | ON_HOST, "b200", engine=EMULATOR)
    assert found.maximum_by_category["optimizer_states"] < 0.001 * found.peak_allocated_bytes


def test_the_process_of_a_card_stays_warm_and_few_are_kept(monkeypatch):
    predict(replace(SMALL, steps=5), "h100", engine=EMULATOR)
    first = call.PROCESSES.workers["h100"].process.pid
    predict(replace(SMALL, steps=6), "h100", engine=EMULATOR)
    assert call.PROCESSES.workers["h100"].process.pid == first
    monkeypatch.setattr(call.PROCESSES, "at_most", len(call.PROCESSES.workers))
    call.PROCESSES.end("t4")
    predict(replace(SMALL, steps=7), "t4", engine=EMULATOR)
    assert list(call.PROCESSES.workers)[-1] == "t4"
    predict(replace(SMALL, steps=7), "a10", engine=EMULATOR)
    assert len(call.PROCESSES.workers) == call.PROCESSES.at_most
