"""Prefix tuning and prompt tuning: learned positions before the text."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.models.generate import generate
from workbench.models.load import load_config, load_model, load_tokenizer
from workbench.models.source import locate
from workbench.techniques import GradientCheckpointing, PrefixTuning, PromptTuning
from workbench.texts import corpus
from workbench.training.job import prepare
from workbench.training.run import run
from workbench.training.trainer import collate
from workbench.training.world import World

C, LAYERS, POSITIONS, T = 64, 2, 128, 32
BOTH = pytest.mark.parametrize("kind", [PrefixTuning, PromptTuning], ids=lambda kind: kind.name)


@BOTH
def test_it_learns_at_the_customary_rate(recipe, fine_tuned, kind):
    adapted = fine_tuned(replace(recipe, learning_rate=None) | kind())
    assert adapted.learning_rate == pytest.approx(0.1)
    assert adapted.held_out_loss < adapted.held_out_loss_before
    assert adapted.losses[0] != pytest.approx(fine_tuned(recipe).losses[0], rel=1e-6)  # it does not start as identity


def test_logits_grow_by_a_prompts_tokens(recipe, fine_tuned):
    plain, adapted = fine_tuned(recipe), fine_tuned(recipe | PromptTuning())
    grown = adapted.maximum_by_category[Category.LOGITS_AND_LOSS] / plain.maximum_by_category[Category.LOGITS_AND_LOSS]
    assert grown == pytest.approx((T + 20) / T, rel=0.01)


def test_the_loss_of_a_prompt_is_that_of_the_same_tokens_as_everywhere(recipe):
    """The mean over the T - 1 tokens after the first: by hand, from the logits."""
    prompted = replace(recipe, steps=1) | PromptTuning(virtual_tokens=3)
    record = run(prompted, device="cpu")
    job = prepare(prompted, World.find("cpu"))
    torch.manual_seed(recipe.seed)
    model = job.recipe.prepare_model(load_model(job.material.source, job.material.config)).eval()
    rows = job.data["eval_dataset"]
    batch = collate([rows[i] for i in range(len(rows))])
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"]).logits[:, 3:-1]
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert record.held_out_loss_before == pytest.approx(by_hand.item(), rel=1e-5)


def test_a_prompt_goes_with_checkpointing(recipe, fine_tuned):
    """Of two blocks, one at a time is kept whole: (22 + 3) of 45 tensors."""
    plain, checkpointed = (
        fine_tuned(recipe | PromptTuning()),
        fine_tuned(recipe | PromptTuning() | GradientCheckpointing()),
    )
    assert checkpointed.losses == pytest.approx(plain.losses, rel=1e-5)
    activations = [record.maximum_by_category[Category.ACTIVATIONS] for record in (plain, checkpointed)]
    assert activations[1] < 0.6 * activations[0]


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
    with pytest.raises(ConfigurationError, match="the 100 positions that prompt_tuning takes .* Use at most 28"):
        run(recipe | PromptTuning(virtual_tokens=100), device="cpu")
    assert len(list(runs_folder.glob("*.json"))) == 1


def test_virtual_tokens_count_against_the_sample_too(recipe):
    with pytest.raises(ConfigurationError, match="sample_tokens must be between 0 and"):
        run(recipe | PrefixTuning(virtual_tokens=90), device="cpu", sample_tokens=30)


@BOTH
def test_it_cannot_be_merged_and_says_so_before_training(recipe, runs_folder, kind):
    words = f"{kind.name} brings virtual tokens before the text, .* Save it as 'adapter'"
    with pytest.raises(ConfigurationError, match=words):
        run(recipe | kind(), device="cpu", save="merged")
    assert not runs_folder.exists()


@BOTH
def test_what_was_saved_loads_beside_its_base_and_writes_what_it_wrote(recipe, kind):
    record = run(replace(recipe, steps=2) | kind(), device="cpu", save="adapter", sample_tokens=12)
    source = locate(record.model_path)
    model, tokenizer = load_model(source, load_config(source)), load_tokenizer(source)
    assert generate(model, tokenizer, corpus.prompt(corpus.load_corpus(recipe.corpus)), 12) == record.text_after
    numbers = 20 * C * (2 * LAYERS if kind is PrefixTuning else 1)
    assert sum(p.numel() for p in model.prompt_encoder.parameters()) == numbers


def test_text_is_continued_by_what_the_model_finds_likeliest(recipe, subtests):
    """The key-value cache of generation, with the virtual tokens in front, against whole forward passes."""
    source = locate(recipe.model)
    for kind in (PrefixTuning, PromptTuning):
        with subtests.test(technique=kind.name):
            model = kind().apply_to(load_model(source, load_config(source))).eval()
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
