import pytest

from workbench.base.device import Device
from workbench.base.errors import UnavailableError
from workbench.journal.record import Status, read_all
from workbench.techniques import MixedPrecision
from workbench.training.run import run


def test_no_loss_is_that_of_fp32_and_the_record_says_in_which_type_it_computed(recipe, fine_tuned):
    plain, mixed = fine_tuned(recipe), fine_tuned(recipe | MixedPrecision())
    assert all(a != b for a, b in zip(mixed.losses, plain.losses, strict=True))
    assert (plain.dtype, mixed.dtype) == ("float32", "autocast bf16")


def test_fp16_without_a_gpu_is_refused_and_recorded(recipe, runs_folder):
    with pytest.raises(UnavailableError, match=r"fp16 needs a GPU, and this run is on the cpu: .* Use dtype:bf16"):
        run(recipe | MixedPrecision(dtype="fp16"), device="cpu")
    (record,) = read_all(runs_folder)
    assert record.status is Status.UNAVAILABLE
    assert "needs a GPU" in record.error
    assert record.losses == []
    assert record.peak_allocated_bytes is None


def test_fp16_is_missing_on_the_cpu_alone():
    assert "Use dtype:bf16" in MixedPrecision(dtype="fp16").missing(Device("cpu"))
    assert MixedPrecision(dtype="bf16").missing(Device("cpu")) is None
    assert MixedPrecision(dtype="fp16").missing(Device("cuda")) is None
    assert MixedPrecision(dtype="fp16").missing(Device("mps")) is None
