"""Every registered technique predicts, and what it predicts is what a run on this machine then measures.

One band for all: a stand-in, made from a library's formulas because its kernels cannot be traced, is as near as a
traced technique. What is between is a few hundred bytes of scratch and of scalars.
"""

import math
from dataclasses import replace

import pytest

from workbench import predict
from workbench.errors import ConfigurationError
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Allocator,
    Optimizer,
    OptimizerOffloading,
    Padding,
    PromptTuning,
    Qlora,
    TorchCompile,
)  # fmt: skip
from workbench.techniques.optimizer import KINDS

BAND = 0.005  # of the measured peak, and of each category; 0.02% were seen
NEGLIGIBLE = 0.001  # of the peak, in a category that is itself small
MORE = (
    ActivationOffloading(to="disk"),
    OptimizerOffloading(to="disk"),
    *(
        Optimizer(kind=kind)
        for kind, table in KINDS.items()
        if "library" not in table and "cpu" in table.get("devices", ["cpu"]) and Optimizer(kind=kind) != Optimizer()
    ),
    Padding(dynamic=False),
    Qlora(double_quantization=False),
    *(Optimizer(kind=kind) for kind in ("adamw_4bit_stochastic", "adamw_kahan")),
)
DEFAULTS = tuple(technique() for technique in REGISTRY.values() if technique is not TorchCompile)  # it is refused


def _plain(recipe, technique):
    """A recipe that the technique suits: a piece of 64 tokens needs a longer sequence than the others do."""
    try:
        return (recipe | technique).baseline
    except ConfigurationError:
        return replace(recipe, sequence_length=128)


@pytest.mark.parametrize("technique", [*DEFAULTS, *MORE], ids=str)
def test_the_predicted_peak_is_the_measured_one(recipe, fine_tuned, technique):
    if reason := technique.missing("cpu"):
        pytest.skip(reason)
    plain = _plain(recipe, technique)
    before, after = fine_tuned(plain), fine_tuned(plain | technique)
    found, base = predict(plain | technique, "cpu"), predict(plain, "cpu")
    allowed = BAND * after.peak_allocated_bytes
    assert found.peak_allocated_bytes == pytest.approx(after.peak_allocated_bytes, abs=allowed)
    for category, measured in after.by_category.items():
        near = max(BAND * measured, NEGLIGIBLE * after.peak_allocated_bytes)
        assert found.by_category[category] == pytest.approx(measured, abs=near), category
    change = after.peak_allocated_bytes - before.peak_allocated_bytes
    assert found.peak_allocated_bytes - base.peak_allocated_bytes == pytest.approx(change, abs=allowed)
    assert (found.parameters, found.trainable_parameters) == (after.parameters, after.trainable_parameters)
    assert found.micro_batch_size == after.micro_batch_size


@pytest.mark.parametrize("technique", DEFAULTS, ids=str)
def test_it_predicts_for_a_gpu(recipe, technique):
    plain = _plain(recipe, technique)
    found, base = predict(plain | technique, "h100"), predict(plain, "h100")
    assert sum(found.by_category.values()) == found.peak_allocated_bytes
    assert math.isfinite(found.flops)
    for category in technique.attacks:
        assert found.maximum_by_category[category] < base.maximum_by_category[category], category


def test_expandable_segments_reserve_less(recipe):
    plain, other = predict(recipe), predict(recipe | Allocator())
    assert other.peak_reserved_bytes < plain.peak_reserved_bytes


def test_what_is_not_modelled_is_refused(recipe):
    with pytest.raises(ConfigurationError, match="predict: allocator=.* Measure it with `run`"):
        predict(recipe | Allocator(max_split_size_mb=64))


def test_positions_that_a_technique_takes_must_be_there(recipe):
    with pytest.raises(ConfigurationError, match="20 positions that prompt_tuning takes"):
        predict(replace(recipe, sequence_length=128) | PromptTuning())
