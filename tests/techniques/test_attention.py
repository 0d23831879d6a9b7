from dataclasses import replace

import pytest
from transformers import GPT2Config

from workbench.base.categories import Category
from workbench.models.family import family_of
from workbench.models.load import load_config, load_model
from workbench.models.source import locate
from workbench.techniques import Attention

GPT2 = family_of(GPT2Config())

LAYERS, HEADS = 2, 4
B, T = 8, 32
PROBABILITIES = B * HEADS * T * T * 4  # bytes, one layer


def test_eager_adds_up_in_another_order(recipe, fine_tuned):
    assert fine_tuned(recipe | Attention()).losses != fine_tuned(recipe).losses


def test_eager_keeps_the_probabilities_of_every_layer(recipe, fine_tuned):
    fused = fine_tuned(recipe).maximum_by_category
    eager = fine_tuned(recipe | Attention()).maximum_by_category
    row_sums = LAYERS * B * HEADS * T * 4  # what the fused kernel keeps instead
    assert eager[Category.ACTIVATIONS] - fused[Category.ACTIVATIONS] == LAYERS * PROBABILITIES - row_sums


def test_twice_the_length_is_four_times_the_probabilities(recipe, fine_tuned):
    long = replace(recipe, sequence_length=64, steps=1)
    short = replace(recipe, steps=1)
    more = [
        fine_tuned(r | Attention()).maximum_by_category[Category.ACTIVATIONS]
        - fine_tuned(r).maximum_by_category[Category.ACTIVATIONS]
        for r in (short, long)
    ]
    assert more[1] / more[0] == pytest.approx(4, rel=0.05)


def test_with_dropout_the_cpu_has_no_fused_kernel_and_keeps_as_much(recipe, fine_tuned):
    dropping = replace(recipe, dropout=0.1, steps=1)
    fused, eager = fine_tuned(dropping), fine_tuned(dropping | Attention())
    assert fused.maximum_by_category[Category.ACTIVATIONS] == eager.maximum_by_category[Category.ACTIVATIONS]


def test_saved_and_new_models_take_it_and_leave_the_config_alone(subtests):
    for name in ("gpt2-tiny", "random:gpt2-tiny"):
        with subtests.test(name):
            source = locate(name)
            config = load_config(source)
            before = config.to_dict()
            model = load_model(source, config, **Attention().model_arguments(GPT2))
            assert model.config._attn_implementation == "eager"
            assert config.to_dict() == before
            assert load_model(source, config).config._attn_implementation == "sdpa"
