from dataclasses import replace

import pytest
import torch

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.recipe import Recipe
from workbench.run.job import prepare
from workbench.techniques import BatchSize, GradientAccumulation

SIZES = pytest.mark.parametrize("size", [2, 4])


@SIZES
def test_the_tokens_seen_stay_equal_in_more_steps(recipe, fine_tuned, size):
    plain, small = fine_tuned(recipe), fine_tuned(recipe | BatchSize(size=size))
    assert small.micro_batch_size == size
    assert small.gradient_accumulation_steps == 1
    assert small.steps_done == len(small.losses) == plain.steps_done * 8 // size
    assert small.tokens_seen == plain.tokens_seen == recipe.steps * 8 * 32


def test_tokens_stay_equal_over_more_than_one_epoch(recipe, fine_tuned, text_file, tmp_path):
    """A text of 18 blocks: the 2 beyond two batches of 8 are dropped for both."""
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text(encoding="utf-8")[:1800], encoding="utf-8")
    repeated = replace(recipe, corpus=str(short), steps=4)
    assert fine_tuned(repeated | BatchSize(size=2)).tokens_seen == fine_tuned(repeated).tokens_seen


@SIZES
def test_activations_and_logits_shrink_with_the_batch(recipe, fine_tuned, size):
    plain = fine_tuned(recipe).maximum_by_category
    small = fine_tuned(recipe | BatchSize(size=size)).maximum_by_category
    for category in BatchSize.attacks:
        assert small[category] / plain[category] == pytest.approx(size / 8, rel=0.05)
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES):
        assert small[category] == plain[category]


def test_it_is_the_recipe_of_that_batch(recipe, fine_tuned):
    """Of this text both keep all blocks, so it is the same run."""
    asked = recipe | BatchSize(size=4)
    written_out = replace(recipe, effective_batch_size=4, steps=12)
    assert fine_tuned(asked).losses == fine_tuned(written_out).losses


def test_it_is_other_training_than_accumulation(recipe, fine_tuned):
    small, accumulated = (fine_tuned(recipe | t) for t in (BatchSize(size=2), GradientAccumulation(steps=4)))
    assert small.micro_batch_size == accumulated.micro_batch_size
    assert small.tokens_seen == accumulated.tokens_seen
    assert small.steps_done == 4 * accumulated.steps_done
    assert abs(small.held_out_loss - accumulated.held_out_loss) > 0.01
    assert small.peak_allocated_bytes <= accumulated.peak_allocated_bytes


def test_accumulation_splits_the_smaller_batch(recipe, fine_tuned):
    alone = fine_tuned(recipe | BatchSize(size=4))
    both = fine_tuned(recipe | BatchSize(size=4) | GradientAccumulation(steps=2))
    assert (both.micro_batch_size, both.gradient_accumulation_steps) == (2, 2)
    assert both.tokens_seen == alone.tokens_seen
    assert both.losses == pytest.approx(alone.losses, rel=2e-5)


def test_accumulation_that_does_not_split_the_smaller_batch_is_refused():
    with pytest.raises(ConfigurationError, match="a batch of 2 cannot be split into 4 .* Possible steps .*: 2."):
        Recipe(effective_batch_size=8) | BatchSize(size=2) | GradientAccumulation(steps=4)


@pytest.mark.parametrize(("batch", "size", "possible"), [(8, 3, "1, 2, 4"), (8, 8, "1, 2, 4"), (6, 12, "1, 2, 3")])
def test_a_batch_that_is_no_equal_part_is_refused(batch, size, possible):
    with pytest.raises(ConfigurationError) as caught:
        Recipe(effective_batch_size=batch) | BatchSize(size=size)
    message = str(caught.value)
    assert f"batches of {size} are not equal parts of the recipe's batch of {batch}" in message
    assert message.endswith(f"Possible sizes for this batch: {possible}.")


def test_a_batch_of_one_cannot_be_smaller():
    with pytest.raises(ConfigurationError, match="none: use a larger batch"):
        Recipe(effective_batch_size=1) | BatchSize(size=1)


def test_the_customary_learning_rate_falls_with_the_root_of_the_tokens_of_a_step(recipe):
    asked = replace(recipe, learning_rate=None) | BatchSize(size=2)
    assert prepare(asked, torch.device("cpu")).learning_rate == pytest.approx(1e-3 / 2)
    assert prepare(replace(asked, learning_rate=3e-3), torch.device("cpu")).learning_rate == 3e-3
