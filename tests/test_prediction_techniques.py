"""Every registered technique predicts, and what it predicts is what a run on this machine then measures.

Kernels that cannot be traced have a stand-in, made from the formulas of the library that has them. Scratch tensors of a
few hundred bytes that its Python code makes on the way are not in these formulas, so its band is wider.
"""

from dataclasses import replace

import pytest

from workbench import predict
from workbench.errors import ConfigurationError
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Optimizer,
    OptimizerOffloading,
    Padding,
    Qlora,
)  # fmt: skip
from workbench.techniques.optimizer import FOREACH, TRAINER

BAND, STAND_IN_BAND = 0.01, 0.025  # of the measured peak
MORE = (
    ActivationOffloading(to="disk"),
    OptimizerOffloading(to="disk"),
    *(Optimizer(kind=kind) for kind in (*TRAINER, *FOREACH) if Optimizer(kind=kind) != Optimizer()),
    Padding(dynamic=False),
    Qlora(double_quantization=False),
)
CASES = (*(technique() for technique in REGISTRY.values()), *MORE)
every = pytest.mark.parametrize("technique", CASES, ids=str)


def _plain(recipe, technique):
    """A recipe that the technique suits: a piece of 64 tokens needs a longer sequence than the others do."""
    try:
        return (recipe | technique).baseline
    except ConfigurationError:
        return replace(recipe, sequence_length=128)


def _band(technique):
    return BAND if technique.stand_in() is technique else STAND_IN_BAND


@every
def test_the_predicted_peak_is_the_measured_one(recipe, fine_tuned, technique):
    if reason := technique.missing("cpu"):
        pytest.skip(reason)
    plain = _plain(recipe, technique)
    before, after = fine_tuned(plain), fine_tuned(plain | technique)
    found, base = predict(plain | technique, "cpu"), predict(plain, "cpu")
    allowed = _band(technique) * after.peak_allocated_bytes
    print(f"{found.peak_allocated_bytes / after.peak_allocated_bytes - 1:+.4%} {found.label}")
    assert found.peak_allocated_bytes == pytest.approx(after.peak_allocated_bytes, abs=allowed)
    for category, measured in after.by_category.items():
        assert found.by_category[category] == pytest.approx(measured, abs=allowed), category
    change = after.peak_allocated_bytes - before.peak_allocated_bytes
    assert found.peak_allocated_bytes - base.peak_allocated_bytes == pytest.approx(change, abs=allowed)
    assert (found.parameters, found.trainable_parameters) == (after.parameters, after.trainable_parameters)
    assert found.micro_batch_size == after.micro_batch_size


@every
def test_it_predicts_for_a_gpu(recipe, technique):
    plain = _plain(recipe, technique)
    found, base = predict(plain | technique, "h100"), predict(plain, "h100")
    assert sum(found.by_category.values()) == found.peak_allocated_bytes
    for category in technique.attacks:
        assert found.maximum_by_category[category] < base.maximum_by_category[category], category
