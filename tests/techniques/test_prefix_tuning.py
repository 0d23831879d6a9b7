from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.models.generate import generate
from workbench.models.load import load_config, load_model, load_tokenizer
from workbench.models.source import locate
from workbench.run.run import run
from workbench.techniques import GradientCheckpointing, Lora, PrefixTuning
from workbench.texts import corpus

C, LAYERS, POSITIONS, B, T = 64, 2, 128, 8, 32
KINDS = pytest.mark.parametrize("prefix", [PrefixTuning(), PrefixTuning(virtual_tokens=3)], ids=str)


def trained(virtual_tokens):
    return virtual_tokens * LAYERS * 2 * C


@KINDS
def test_the_trainable_parameters_are_those_of_the_formula(recipe, fine_tuned, prefix):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | prefix)
    assert adapted.trainable_parameters == trained(prefix.virtual_tokens)
    assert adapted.parameters == plain.parameters + trained(prefix.virtual_tokens)


@KINDS
def test_gradients_and_states_exist_for_the_prefix_alone(recipe, fine_tuned, prefix):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | prefix)
    count = trained(prefix.virtual_tokens)
    assert adapted.maximum_by_category[Category.GRADIENTS] == 4 * count
    assert adapted.maximum_by_category[Category.OPTIMIZER_STATES] == 8 * count + 4
    for category in PrefixTuning.attacks:
        assert adapted.maximum_by_category[category] < 0.1 * plain.maximum_by_category[category]


@KINDS
def test_it_learns(recipe, fine_tuned, prefix):
    customary = replace(recipe, learning_rate=None, steps=12)
    adapted = fine_tuned(customary | prefix)
    assert adapted.held_out_loss < adapted.held_out_loss_before
    assert adapted.losses[0] != pytest.approx(fine_tuned(recipe).losses[0], rel=1e-6)  # it does not start as identity


def test_what_it_keeps_is_lora_without_the_input_of_a_and_with_copies_of_keys_and_values(recipe, fine_tuned):
    """Within 3%: the rest are LayerNorm's statistics."""
    n, unit = 20, B * T * C * 4
    by_hand = LAYERS * (22 + 2 * (1 + n / T) + (T + n) / C) * unit  # the last term: the attention mask, in fp32
    measured = fine_tuned(recipe | PrefixTuning()).maximum_by_category[Category.ACTIVATIONS]
    assert measured == pytest.approx(by_hand, rel=0.03)


def test_the_tokens_seen_are_those_of_the_text(recipe, fine_tuned):
    assert fine_tuned(recipe | PrefixTuning()).tokens_seen == fine_tuned(recipe).tokens_seen


def test_the_customary_learning_rate_is_a_hundred_times_higher(recipe, fine_tuned):
    assert fine_tuned(replace(recipe, learning_rate=None, steps=12) | PrefixTuning()).learning_rate == pytest.approx(
        0.1
    )


def test_checkpointing_is_refused_with_the_reason(recipe):
    with pytest.raises(
        ConfigurationError,
        match="prefix_tuning brings a key-value cache during training, which gradient_checkpointing forbids. Drop one",
    ):
        recipe | PrefixTuning() | GradientCheckpointing()


def test_a_second_adapter_is_refused(recipe):
    with pytest.raises(ConfigurationError, match="brings an adapter beside the frozen model, which"):
        recipe | PrefixTuning() | Lora()


def test_virtual_tokens_count_against_the_positions_before_anything_is_loaded(recipe, runs_folder):
    full = replace(recipe, sequence_length=POSITIONS - 20, effective_batch_size=2, steps=1)
    assert run(full | PrefixTuning(), device="cpu").steps_done == 1
    with pytest.raises(
        ConfigurationError,
        match="sequence_length 109 with the 20 positions that prefix_tuning takes is beyond the 128.*Use at most 108",
    ):
        run(replace(full, sequence_length=POSITIONS - 19) | PrefixTuning(), device="cpu")
    with pytest.raises(ConfigurationError, match="prefix_tuning takes is beyond the 128 positions.*Take fewer of them"):
        run(recipe | PrefixTuning(virtual_tokens=200), device="cpu")
    assert len(list(runs_folder.glob("*.json"))) == 1


def test_virtual_tokens_count_against_the_sample_too(recipe):
    with pytest.raises(ConfigurationError, match="sample_tokens must be between 0 and"):
        run(recipe | PrefixTuning(virtual_tokens=90), device="cpu", sample_tokens=30)


def test_it_cannot_be_merged_and_says_so_before_training(recipe, runs_folder):
    with pytest.raises(
        ConfigurationError, match="prefix_tuning brings virtual tokens before the text, .* Save it as 'adapter'"
    ):
        run(recipe | PrefixTuning(), device="cpu", save="merged")
    assert not runs_folder.exists()


def test_a_saved_prefix_loads_beside_its_base_and_writes_what_it_wrote(recipe):
    record = run(replace(recipe, steps=3) | PrefixTuning(), device="cpu", save="adapter", sample_tokens=12)
    source = locate(record.model_path)
    model, tokenizer = load_model(source, load_config(source)), load_tokenizer(source)
    assert generate(model, tokenizer, corpus.prompt(corpus.load_corpus(recipe.corpus)), 12) == record.text_after
    assert sum(p.numel() for p in model.prompt_encoder.parameters()) == trained(20)


def test_text_is_continued_by_what_the_model_finds_likeliest(recipe):
    """The key-value cache of generation, with the prefix in front, against whole forward passes."""
    source = locate(recipe.model)
    model = PrefixTuning().applied_to(load_model(source, load_config(source))).eval()
    whole = cached = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for _ in range(5):
            whole = torch.cat([whole, model(input_ids=whole).logits[:, -1:].argmax(-1)], dim=1)
        cached = model.generate(input_ids=cached, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(whole, cached)


def test_a_saved_prefix_is_refused_as_a_model_to_fine_tune(recipe):
    kept = run(replace(recipe, steps=1) | PrefixTuning(virtual_tokens=3), device="cpu", save="adapter")
    assert (Path(kept.model_path) / "adapter_config.json").exists()
    with pytest.raises(ConfigurationError, match="an adapter of 3 virtual tokens, .* Start from its base, 'random:"):
        run(replace(recipe, model=kept.model_path), device="cpu")
