"""The engine that is no model: a prediction by PyTorch's own allocator, on an emulated GPU."""

from dataclasses import replace

import pytest

from workbench import Recipe
from workbench.base.categories import Category, Phase
from workbench.base.errors import ConfigurationError
from workbench.base.launch import Fork
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import call
from workbench.prediction import worker as prediction_worker
from workbench.prediction.predict import CPU, EMULATOR, SHADOW, predict
from workbench.techniques import (
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
from workbench.training.run import run

pytestmark = [
    pytest.mark.dear,
    pytest.mark.xdist_group("emulated"),  # one warm process for all
    pytest.mark.usefixtures("emulator", "predicted_once"),
]

SMALL = Recipe(model="gpt2-tiny", effective_batch_size=4, sequence_length=64, steps=3)
LARGE = Recipe(model="random:gpt2", effective_batch_size=8, sequence_length=1024, steps=3)
HALF = (MixedPrecision(dtype="fp16"), Lora())


@pytest.fixture(scope="module")
def shallow(shallow_gpt2):
    """Of fewer layers and a smaller batch than `LARGE`, where one says as much as the other."""
    return replace(LARGE, model=shallow_gpt2, effective_batch_size=2)


@pytest.fixture
def own_predictions(tmp_path, monkeypatch):
    """A folder in which nothing has been predicted."""
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "own"))


def label(techniques):
    return replace(LARGE, techniques=techniques).label


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(SMALL, id="gpt2-tiny"),
        LARGE,
        LARGE | GradientCheckpointing(),
        LARGE | MixedPrecision(dtype="fp16") | Lora(),
        LARGE | MixedPrecision(dtype="bf16") | Lora(),
        replace(LARGE, effective_batch_size=16) | GradientAccumulation(steps=8),
    ],
    ids=lambda recipe: recipe.label,
)
def test_both_engines_say_what_a_run_on_the_same_card_needs(recipe, tmp_path):
    """A prediction has no weights and no text; a run on the emulated card has both. Bytes are the same."""
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert real.by_phase == dict(record.by_phase)
    assert real.peak_reserved_bytes == record.peak_reserved_bytes
    assert real.peak_phase == record.peak_phase
    assert real.source == record.memory_source == "emulated:h100"
    assert real.gradient_accumulation_steps == record.gradient_accumulation_steps
    assert shadow.by_phase == real.by_phase
    assert shadow.fits == real.fits
    assert shadow.source == "predicted:h100"
    assert shadow.work == pytest.approx(real.work, rel=0.002)


def test_where_lengths_differ_the_longest_example_sets_the_peak(tmp_path, shallow):
    """In every batch of the first steps: a run meets it when the optimizer has its states."""
    recipe = replace(shallow, effective_batch_size=4, sequence_length=512) | Padding()
    predicted = predict(recipe, "h100", engine=EMULATOR)
    usual = run(replace(recipe, steps=12), device="emulated:h100", folder=tmp_path)
    first = run(recipe, device="emulated:h100", longest_first=True, folder=tmp_path)
    assert predicted.padding
    assert predicted.peak_allocated_bytes == pytest.approx(first.peak_allocated_bytes, rel=1e-5)
    assert predicted.peak_reserved_bytes == first.peak_reserved_bytes
    assert predicted.peak_allocated_bytes >= usual.peak_allocated_bytes - 1024


def test_the_parts_sum_to_the_peak_and_say_what_they_are():
    predicted = predict(LARGE, "h100", engine=EMULATOR)
    assert sum(predicted.by_category.values()) == predicted.peak_allocated_bytes == max(predicted.by_phase.values())
    assert predicted.by_category[Category.WEIGHTS] == 4 * 124_439_808
    # of the forward pass and of autograd's thread
    assert predicted.workspace_bytes == 2 * gpu("h100").cublas_workspace_bytes
    assert predicted.peak_operation == "aten._log_softmax_backward_data.default"
    assert predicted.parameters == predicted.trainable_parameters == 124_439_808
    assert predicted.timeline.total.max() <= predicted.peak_allocated_bytes
    assert "PyTorch's allocator on an emulated GPU, not measured" in str(predicted)


def test_an_evaluation_that_peaks_has_its_parts_too():
    """Short padded examples, nothing kept for the backward pass: the held-out blocks need more."""
    recipe = replace(LARGE, effective_batch_size=4) | GradientCheckpointing() | Padding()
    predicted = predict(recipe, "h100", engine=EMULATOR)
    assert predicted.peak_phase == Phase.EVALUATION
    assert predicted.by_category[Category.WEIGHTS] == 4 * 124_439_808
    assert predicted.by_category[Category.UNATTRIBUTED] < 0.1 * predicted.peak_allocated_bytes


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
    recipes = LARGE, LARGE | Optimizer(kind="adamw_8bit")
    plain, small = (predict(recipe, "h100", engine=EMULATOR) for recipe in recipes)
    states = Category.OPTIMIZER_STATES
    # the embeddings' states stay in 32 bits, as the Trainer asks
    assert 0.3 < small.maximum_by_category[states] / plain.maximum_by_category[states] < 0.55


def test_padding_is_an_input_too():
    plain, padded = predict(LARGE, engine=EMULATOR), predict(LARGE, padding=True, engine=EMULATOR)
    mask = 8 * 1024 * 1024 * 4
    assert not plain.padding
    assert padded.padding
    assert padded.peak_allocated_bytes - plain.peak_allocated_bytes > 0.9 * mask


def test_what_cannot_be_is_refused_as_a_run_refuses_it():
    with pytest.raises(ConfigurationError, match="predict: mixed_precision=dtype:bf16 needs compute capability 8.0"):
        predict(SMALL | MixedPrecision(dtype="bf16"), "t4", engine=EMULATOR)
    with pytest.raises(ConfigurationError, match="sequence_length"):
        predict(replace(SMALL, sequence_length=4096), "t4", engine=EMULATOR)


@pytest.mark.usefixtures("own_predictions")
def test_each_engine_has_predictions_of_its_own():
    exact, shadow = (predict(SMALL, "t4", engine=engine) for engine in (EMULATOR, SHADOW))
    again = predict(SMALL, "t4", engine=EMULATOR), predict(SMALL, "t4", engine=SHADOW)
    assert again == (exact, shadow)
    assert (exact.source, shadow.source) == ("emulated:t4", "predicted:t4")


def test_a_shadow_that_is_a_fork_of_the_emulators_process_casts_the_same():
    prediction_worker.SHADOWS.end()
    call.start_trunk(gpu("t4"), prediction_worker.CARD_MODULES)
    asked = SMALL | MixedPrecision("fp16") | Lora(), ["t4", "h100", CPU], False
    forked = prediction_worker.ask_shadow(*asked)
    assert isinstance(prediction_worker.SHADOWS.children["shadow"], Fork)
    prediction_worker.SHADOWS.end()
    call.TRUNK.end()
    alone = prediction_worker.ask_shadow(*asked)
    assert [replace(answer, versions={}) for answer in alone] == [replace(answer, versions={}) for answer in forked]
    assert not isinstance(prediction_worker.SHADOWS.children["shadow"], Fork)


@pytest.mark.usefixtures("own_predictions")
def test_where_nothing_can_be_forked_each_card_has_a_process_of_its_own(monkeypatch):
    forked = predict(SMALL, "t4", engine=EMULATOR)
    call.PROCESSES.end()
    monkeypatch.setattr(call, "fork_of_trunk", lambda *_: None)
    alone = predict(replace(SMALL, steps=4), "t4", engine=EMULATOR)
    assert not isinstance(call.PROCESSES.children["t4"], Fork)
    assert alone.by_category == forked.by_category
    call.PROCESSES.end()


@pytest.mark.usefixtures("own_predictions")
def test_the_process_of_a_card_stays_warm_and_few_are_kept(monkeypatch):
    predict(SMALL, "h100", engine=EMULATOR)
    first = call.PROCESSES.children["h100"].process.pid
    predict(replace(SMALL, steps=4), "h100", engine=EMULATOR)
    assert call.PROCESSES.children["h100"].process.pid == first
    monkeypatch.setattr(call.PROCESSES, "at_most", len(call.PROCESSES.children))
    call.PROCESSES.end("t4")
    predict(SMALL, "t4", engine=EMULATOR)
    assert list(call.PROCESSES.children)[-1] == "t4"
    predict(SMALL, "a10", engine=EMULATOR)
    assert len(call.PROCESSES.children) == call.PROCESSES.at_most


# ---- what the shadow models, against the libraries themselves ----


@pytest.mark.parametrize(
    ("dropout", "partners"), [(0.0, ()), (0.1, HALF), (0.0, (Lora(dropout=0.1),))], ids=["plain", "half", "lora"]
)
def test_what_selective_checkpointing_keeps_is_the_same_in_both_engines(dropout, partners, shallow):
    recipe = replace(shallow, dropout=dropout, techniques=partners) | SelectiveCheckpointing()
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert shadow.peak_reserved_bytes == pytest.approx(real.peak_reserved_bytes, rel=0.02)
    kept = [prediction.maximum_by_category["activations"] for prediction in (real, shadow)]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4)
    assert shadow.work == pytest.approx(real.work, rel=0.001)


@pytest.mark.parametrize("partners", [(), (StepInBackward(),), HALF], ids=label)
def test_muons_products_are_scratch_in_both_engines(partners, shallow):
    recipe = replace(shallow, effective_batch_size=1, techniques=partners) | Optimizer(kind="muon")
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, abs=4096)
    assert shadow.by_phase["optimizer_step"] == pytest.approx(real.by_phase["optimizer_step"], abs=4096)
    states = [prediction.maximum_by_category["optimizer_states"] for prediction in (real, shadow)]
    assert states[0] == states[1]
    assert shadow.work == pytest.approx(real.work, rel=0.001)


@pytest.mark.parametrize("kind", ["adamw_paged", "adamw_8bit_paged"])
def test_states_in_unified_memory_are_on_the_host_in_both_engines(kind, tmp_path, shallow):
    recipe = shallow | GradientCheckpointing() | Optimizer(kind=kind)
    real, shadow = (predict(recipe, "t4", engine=engine) for engine in (EMULATOR, SHADOW))
    assert shadow.by_phase == real.by_phase
    states = [prediction.maximum_by_category["optimizer_states"] for prediction in (real, shadow)]
    assert states[0] == states[1] < 4_000_000
    bytes_each = 2 if kind == "adamw_8bit_paged" else 8
    record = run(recipe, device="emulated:t4", folder=tmp_path)
    assert record.peak_host_bytes > bytes_each * 0.99 * record.parameters
    assert record.maximum_by_category["optimizer_states"] < 0.01 * record.peak_host_bytes


@pytest.mark.parametrize(
    "techniques",
    [
        (GradientCheckpointing(offload=True, every_n_layers=2), *HALF),
        (GradientCheckpointing(offload=True, use_reentrant=True), ChunkedCrossEntropy()),
    ],
    ids=label,
)
def test_what_transformers_keeps_on_the_host_is_the_same_in_both_engines_and_in_a_run(techniques, tmp_path, shallow):
    recipe = replace(shallow, techniques=techniques)
    real, shadow = (predict(recipe, "h100", engine=engine) for engine in (EMULATOR, SHADOW))
    record = run(recipe, device="emulated:h100", folder=tmp_path)
    assert shadow.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert record.peak_allocated_bytes == pytest.approx(real.peak_allocated_bytes, rel=1e-4)
    assert shadow.peak_reserved_bytes == pytest.approx(real.peak_reserved_bytes, rel=0.02)
    assert record.peak_reserved_bytes == real.peak_reserved_bytes


def test_what_a_library_keeps_on_the_card_changes_no_later_prediction():
    """The tables of bitsandbytes stay for good, and the allocator's blocks with them."""
    after_nothing = predict(replace(SMALL, seed=1) | Qlora(), "l4", engine=EMULATOR)
    after_another = predict(replace(SMALL, seed=2) | Qlora(), "l4", engine=EMULATOR)
    assert after_another.peak_allocated_bytes == after_nothing.peak_allocated_bytes
    assert after_another.peak_reserved_bytes == after_nothing.peak_reserved_bytes
    assert not call.call_on(gpu("l4"), call.tensors_are_left)
