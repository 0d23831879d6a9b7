from dataclasses import replace

import pytest

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation

STEPS = pytest.mark.parametrize("steps", [2, 4, 8])


@STEPS
def test_the_loss_is_that_of_the_large_batch(recipe, fine_tuned, steps):
    plain, accumulated = fine_tuned(recipe), fine_tuned(recipe | GradientAccumulation(steps=steps))
    assert len(plain.losses) == recipe.steps
    assert plain.losses[-1] < plain.losses[0] - 0.1  # it does learn, so an equal loss means equal gradients
    assert accumulated.losses == pytest.approx(plain.losses, rel=2e-5)
    assert accumulated.held_out_loss == pytest.approx(plain.held_out_loss, rel=2e-5)


@STEPS
def test_it_is_exact_over_more_than_one_epoch(recipe, fine_tuned, text_file, tmp_path, steps):
    """A text of 18 blocks: batches of 8 leave 2 over, which must not become a smaller step of their own."""
    short = tmp_path / "short.txt"
    short.write_text(text_file.read_text(encoding="utf-8")[:1800], encoding="utf-8")
    repeated = replace(recipe, corpus=str(short), steps=4)
    plain, accumulated = fine_tuned(repeated), fine_tuned(repeated | GradientAccumulation(steps=steps))
    assert accumulated.tokens_seen == plain.tokens_seen
    assert accumulated.losses == pytest.approx(plain.losses, rel=2e-5)


@STEPS
def test_activations_and_logits_shrink_with_the_micro_batch(recipe, fine_tuned, steps):
    plain = fine_tuned(recipe).maximum_by_category
    accumulated = fine_tuned(recipe | GradientAccumulation(steps=steps)).maximum_by_category
    for category in GradientAccumulation.attacks:
        assert accumulated[category] / plain[category] == pytest.approx(1 / steps, rel=0.05)
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES):
        assert accumulated[category] == plain[category]


@STEPS
def test_the_peak_falls(recipe, fine_tuned, steps):
    plain, accumulated = fine_tuned(recipe), fine_tuned(recipe | GradientAccumulation(steps=steps))
    assert accumulated.peak_allocated_bytes < plain.peak_allocated_bytes


@STEPS
def test_the_record_says_how_the_batch_was_split(recipe, fine_tuned, steps):
    record = fine_tuned(recipe | GradientAccumulation(steps=steps))
    assert record.micro_batch_size == 8 // steps
    assert record.gradient_accumulation_steps == steps
    assert record.steps_done == recipe.steps
    assert record.tokens_seen == fine_tuned(recipe).tokens_seen == recipe.steps * 8 * 32


@pytest.mark.parametrize(("batch", "possible"), [(8, "2, 4, 8"), (6, "2, 3, 6"), (7, "7")])
def test_a_batch_that_does_not_divide_is_refused(batch, possible):
    with pytest.raises(ConfigurationError) as caught:
        Recipe(effective_batch_size=batch) | GradientAccumulation(steps=5)
    message = str(caught.value)
    assert f"a batch of {batch} cannot be split into 5 equal micro-batches" in message
    assert message.endswith(f"Possible steps for this batch: {possible}.")


def test_a_batch_of_one_cannot_be_split_at_all():
    with pytest.raises(ConfigurationError, match="none: use a larger batch"):
        Recipe(effective_batch_size=1) | GradientAccumulation(steps=2)


def test_one_step_is_no_accumulation():
    with pytest.raises(ConfigurationError, match="steps must be an integer of at least 2, got 1"):
        GradientAccumulation(steps=1)


def test_a_technique_that_already_splits_the_batch_is_multiplied():
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert GradientAccumulation(steps=4).training_arguments(arguments) == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
    }  # fmt: skip
