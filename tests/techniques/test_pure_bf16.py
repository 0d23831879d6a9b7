from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from workbench.base.categories import Category
from workbench.base.device import Device
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import Lora, PureBf16


def test_no_loss_is_that_of_fp32_and_the_record_says_in_which_type_it_computed(recipe, fine_tuned):
    plain, pure = fine_tuned(recipe), fine_tuned(recipe | PureBf16())
    assert all(a != b for a, b in zip(pure.losses, plain.losses, strict=True))
    assert pure.dtype == "bfloat16"


def test_weights_and_gradients_are_half_as_large_to_the_byte(recipe, fine_tuned):
    plain = fine_tuned(recipe).maximum_by_category
    pure = fine_tuned(recipe | PureBf16()).maximum_by_category
    for category in (Category.WEIGHTS, Category.GRADIENTS):
        assert 2 * pure[category] == plain[category]


def test_states_are_half_as_large_but_for_the_step_counters(recipe, fine_tuned):
    record = fine_tuned(recipe | PureBf16())
    tensors = len(load_file(Path(record.model_path) / "model.safetensors"))
    assert record.maximum_by_category[Category.OPTIMIZER_STATES] == 2 * 2 * record.parameters + 4 * tensors


def test_the_peak_falls_by_half_of_all_but_the_loss_which_is_fp32_all_the_same(recipe, fine_tuned):
    plain, pure = fine_tuned(recipe), fine_tuned(recipe | PureBf16())
    assert pure.by_category[Category.LOGITS_AND_LOSS] == plain.by_category[Category.LOGITS_AND_LOSS]
    halved = plain.peak_allocated_bytes - plain.by_category[Category.LOGITS_AND_LOSS]
    assert plain.peak_allocated_bytes - pure.peak_allocated_bytes == pytest.approx(halved / 2, rel=0.02)


def test_updates_that_are_small_beside_their_weight_are_lost(recipe, fine_tuned):
    """A rate of 1e-5 changes every fp32 weight. In bf16, all that are beyond 1/256 (84 % of N(0, 0.02)) stay."""
    source = locate(recipe.model)
    name = "transformer.h.0.mlp.c_fc.weight"
    unchanged = {}
    for dtype, techniques in (("float32", ()), ("bfloat16", (PureBf16(),))):
        asked = replace(recipe, learning_rate=1e-5, techniques=techniques)
        after = load_file(Path(fine_tuned(asked).model_path) / "model.safetensors")
        before = load_model(source, load_config(source), dtype=dtype).state_dict()
        unchanged[dtype] = (before[name] == after[name]).float().mean().item()
    assert unchanged["float32"] < 0.01
    assert unchanged["bfloat16"] > 0.8


def test_it_works_beside_lora(recipe, fine_tuned):
    adapted = fine_tuned(recipe | PureBf16() | Lora())
    assert adapted.held_out_loss < adapted.held_out_loss_before
    weights = Category.WEIGHTS
    assert adapted.maximum_by_category[weights] < 0.6 * fine_tuned(recipe).maximum_by_category[weights]


def test_a_gpu_that_would_emulate_it_is_refused():
    assert "compute capability 8.0" in PureBf16().missing(Device("cuda", compute_capability=(7, 5)))
    assert PureBf16().missing(Device("cuda", compute_capability=(8, 0))) is None
    assert PureBf16().missing(Device("cpu")) is None
