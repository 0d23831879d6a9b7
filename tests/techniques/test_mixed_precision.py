import pytest

from workbench.errors import ConfigurationError, UnavailableError
from workbench.measure.categories import Category
from workbench.records.record import Status, read_all
from workbench.run.run import run
from workbench.techniques import MixedPrecision

BAND = 0.01  # of the loss; bf16 keeps 8 bits of mantissa, a rounding of 0.4 % at each operation


def test_the_loss_stays_inside_the_band_and_is_not_that_of_fp32(recipe, fine_tuned):
    plain, mixed = fine_tuned(recipe), fine_tuned(recipe | MixedPrecision())
    assert mixed.losses == pytest.approx(plain.losses, rel=BAND)
    assert mixed.held_out_loss == pytest.approx(plain.held_out_loss, rel=BAND)
    assert all(a != b for a, b in zip(mixed.losses, plain.losses, strict=True))


def test_the_record_says_in_which_type_it_computed(recipe, fine_tuned):
    assert fine_tuned(recipe).dtype == "float32"
    assert fine_tuned(recipe | MixedPrecision()).dtype == "autocast bf16"


def test_activations_shrink_and_weights_gradients_and_states_stay_fp32(recipe, fine_tuned):
    plain = fine_tuned(recipe).maximum_by_category
    mixed = fine_tuned(recipe | MixedPrecision()).maximum_by_category
    for category in MixedPrecision.attacks:
        assert mixed[category] < 0.75 * plain[category]
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES):
        assert mixed[category] == plain[category]


def test_fp16_without_a_gpu_is_refused_and_recorded(recipe, runs_folder):
    with pytest.raises(UnavailableError, match=r"fp16 needs a GPU, and this run is on the cpu: .* Use dtype:bf16"):
        run(recipe | MixedPrecision(dtype="fp16"), device="cpu")
    (record,) = read_all(runs_folder)
    assert record.status is Status.UNAVAILABLE
    assert "needs a GPU" in record.error
    assert record.losses == []
    assert record.peak_allocated_bytes is None


def test_fp16_is_missing_on_the_cpu_alone():
    assert "Use dtype:bf16" in MixedPrecision(dtype="fp16").missing("cpu")
    assert MixedPrecision(dtype="bf16").missing("cpu") is None
    assert MixedPrecision(dtype="fp16").missing("cuda") is None
    assert MixedPrecision(dtype="fp16").missing("mps") is None


def test_another_type_is_refused():
    with pytest.raises(ConfigurationError, match="mixed_precision: dtype must be one of bf16, fp16, got 'float16'"):
        MixedPrecision(dtype="float16")
