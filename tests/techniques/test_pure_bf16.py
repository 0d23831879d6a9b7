from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, Lora, MixedPrecision, PureBf16

BAND = 0.03  # of the loss, at a learning rate whose updates are not lost


def test_the_loss_stays_inside_the_band_and_is_not_that_of_fp32(recipe, fine_tuned):
    plain, pure = fine_tuned(recipe), fine_tuned(recipe | PureBf16())
    assert pure.losses == pytest.approx(plain.losses, rel=BAND)
    assert pure.held_out_loss == pytest.approx(plain.held_out_loss, rel=BAND)
    assert all(a != b for a, b in zip(pure.losses, plain.losses, strict=True))


def test_the_record_says_in_which_type_it_computed(recipe, fine_tuned):
    assert fine_tuned(recipe | PureBf16()).dtype == "bfloat16"


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
    assert pure.maximum_by_category[Category.ACTIVATIONS] < 0.55 * plain.maximum_by_category[Category.ACTIVATIONS]
    assert pure.by_category[Category.LOGITS_AND_LOSS] == plain.by_category[Category.LOGITS_AND_LOSS]
    halved = plain.peak_allocated_bytes - plain.by_category[Category.LOGITS_AND_LOSS]
    assert plain.peak_allocated_bytes - pure.peak_allocated_bytes == pytest.approx(halved / 2, rel=0.02)


@pytest.mark.parametrize(("technique", "lost"), [((), False), ((PureBf16(),), True)], ids=["fp32", "pure_bf16"])
def test_updates_that_are_small_beside_their_weight_are_lost(recipe, fine_tuned, technique, lost):
    """A rate of 1e-5 changes every fp32 weight. In bf16, all that are beyond 1/256 (84 % of N(0, 0.02)) stay."""
    asked = replace(recipe, learning_rate=1e-5, techniques=technique)
    after = load_file(Path(fine_tuned(asked).model_path) / "model.safetensors")
    source = locate(recipe.model)
    before = load_model(source, load_config(source), dtype="bfloat16" if lost else "float32").state_dict()
    name = "transformer.h.0.mlp.c_fc.weight"
    unchanged = (before[name] == after[name]).float().mean().item()
    assert unchanged > 0.8 if lost else unchanged < 0.01


def test_it_excludes_mixed_precision_in_either_order(recipe):
    for techniques in ((PureBf16(), MixedPrecision()), (MixedPrecision(), PureBf16())):
        with pytest.raises(ConfigurationError, match="pure_bf16 brings 16-bit weights, which mixed_precision forbids"):
            Recipe(techniques=techniques)


def test_it_works_beside_checkpointing_and_lora(recipe, fine_tuned):
    alone, both = fine_tuned(recipe | PureBf16()), fine_tuned(recipe | PureBf16() | GradientCheckpointing())
    assert both.losses == alone.losses
    adapted = fine_tuned(recipe | PureBf16() | Lora())
    assert adapted.held_out_loss < adapted.held_out_loss_before
    assert (
        adapted.maximum_by_category[Category.WEIGHTS] < 0.6 * fine_tuned(recipe).maximum_by_category[Category.WEIGHTS]
    )


def test_a_gpu_that_would_emulate_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: emulated)
    assert "compute capability 8.0" in PureBf16().missing("cuda")
    assert PureBf16().missing("cpu") is None
