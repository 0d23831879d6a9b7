"""Every registered technique predicts, and what it predicts is what a run on this machine then measures.

One band for all: a stand-in, made from a library's formulas because its kernels cannot be traced, is as near as a
traced technique. What is between is a few hundred bytes of scratch and of scalars.
"""

import math
from dataclasses import replace

import pytest

from workbench import predict
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Allocator,
    GradientCheckpointing,
    Lora,
    Optimizer,
    OptimizerOffloading,
    Padding,
    PromptTuning,
    Qlora,
    TorchCompile,
)  # fmt: skip
from workbench.techniques.optimizer import KINDS, use_library

pytestmark = pytest.mark.usefixtures("predicted_once")
BAND = 0.005  # of the measured peak, and of each category; 0.02% were seen
NEGLIGIBLE = 0.001  # of the peak, in a category that is itself small
MORE = (
    ActivationOffloading(to="disk"),
    OptimizerOffloading(to="disk"),
    *(
        Optimizer(kind=name)
        for name, kind in KINDS.items()
        if not (kind.call and kind.call.function is use_library) and "cpu" in kind.devices and name != Optimizer().kind
    ),
    Padding(dynamic=False),
    Qlora(double_quantization=False),
    *(Optimizer(kind=kind) for kind in ("adamw_4bit_stochastic", "adamw_kahan")),
)
DEFAULTS = tuple(technique() for technique in REGISTRY.values() if technique is not TorchCompile)  # it is refused


QUICK = (  # of four kinds; the others are dear
    GradientCheckpointing(),
    Lora(),
    ActivationOffloading(to="disk"),
    OptimizerOffloading(to="disk"),
)


@pytest.fixture(scope="module")
def short(recipe):
    """Three steps: the states of the optimizer are there from the second on."""
    return replace(recipe, steps=3)


def _plain(recipe, technique):
    """A recipe that the technique suits: a piece of 64 tokens needs a longer sequence than the others do."""
    try:
        return (recipe | technique).baseline
    except ConfigurationError:
        return replace(recipe, sequence_length=128)


def assert_predicted_as_measured(plain, technique, fine_tuned):
    before, after = fine_tuned(plain), fine_tuned(plain | technique)
    predicted, base = predict(plain | technique, "cpu"), predict(plain, "cpu")
    allowed = BAND * after.peak_allocated_bytes
    assert predicted.peak_allocated_bytes == pytest.approx(after.peak_allocated_bytes, abs=allowed)
    for category, measured in after.by_category.items():
        near = max(BAND * measured, NEGLIGIBLE * after.peak_allocated_bytes)
        assert predicted.by_category[category] == pytest.approx(measured, abs=near), category
    change = after.peak_allocated_bytes - before.peak_allocated_bytes
    assert predicted.peak_allocated_bytes - base.peak_allocated_bytes == pytest.approx(change, abs=allowed)
    assert (predicted.parameters, predicted.trainable_parameters) == (after.parameters, after.trainable_parameters)
    assert predicted.micro_batch_size == after.micro_batch_size


@pytest.mark.parametrize("technique", QUICK, ids=str)
def test_the_predicted_peak_is_the_measured_one(short, fine_tuned, technique):
    assert_predicted_as_measured(short, technique, fine_tuned)


@pytest.mark.dear
def test_the_predicted_peak_is_the_measured_one_with_every_technique(short, fine_tuned, subtests):
    for technique in (*DEFAULTS, *MORE):
        if technique not in QUICK and not technique.missing(Device("cpu")):
            with subtests.test(technique=str(technique)):
                assert_predicted_as_measured(_plain(short, technique), technique, fine_tuned)


@pytest.mark.dear
def test_it_predicts_for_a_gpu(short, subtests):
    for technique in DEFAULTS:
        with subtests.test(technique=str(technique)):
            plain = _plain(short, technique)
            predicted, base = predict(plain | technique, "h100"), predict(plain, "h100")
            assert sum(predicted.by_category.values()) == predicted.peak_allocated_bytes
            assert math.isfinite(predicted.flops)
            for category in technique.attacks:
                assert predicted.maximum_by_category[category] < base.maximum_by_category[category], category


def test_expandable_segments_reserve_less(recipe):
    plain, other = predict(recipe), predict(recipe | Allocator())
    assert other.peak_reserved_bytes < plain.peak_reserved_bytes


def test_positions_that_a_technique_takes_must_be_there(recipe):
    with pytest.raises(ConfigurationError, match="20 positions that prompt_tuning takes"):
        predict(replace(recipe, sequence_length=128) | PromptTuning())
