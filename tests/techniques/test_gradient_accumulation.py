import pytest

from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation


def test_it_is_exact_over_more_than_one_epoch(repeated, fine_tuned):
    """A text of 18 blocks: batches of 8 leave 2 over, which must not become a smaller step of their own."""
    plain = fine_tuned(repeated)
    for steps in (2, 8):
        accumulated = fine_tuned(repeated | GradientAccumulation(steps=steps))
        assert accumulated.tokens_seen == plain.tokens_seen
        assert accumulated.losses == pytest.approx(plain.losses, rel=2e-5)


def test_the_record_says_how_the_batch_was_split(recipe, fine_tuned, subtests):
    for steps in (2, 8):
        with subtests.test(steps=steps):
            record = fine_tuned(recipe | GradientAccumulation(steps=steps))
            assert record.micro_batch_size == 8 // steps
            assert record.gradient_accumulation_steps == steps
            assert record.steps_done == recipe.steps


def test_a_batch_that_does_not_divide_is_refused_with_what_would(subtests):
    for batch, steps, possible in (
        (8, 5, "2, 4, 8"), (6, 5, "2, 3, 6"), (7, 5, "7"), (1, 2, "none: use a larger batch")
    ):  # fmt: skip
        with subtests.test(batch=batch):
            with pytest.raises(ConfigurationError) as caught:
                Recipe(effective_batch_size=batch) | GradientAccumulation(steps=steps)
            assert str(caught.value) == (
                f"gradient_accumulation_steps: a batch of {batch} cannot be split into {steps} equal micro-batches. "
                f"Possible steps for this batch: {possible}."
            )


def test_one_step_is_no_accumulation():
    with pytest.raises(ConfigurationError, match="steps must be an integer of at least 2, got 1"):
        GradientAccumulation(steps=1)


def test_a_technique_that_already_splits_the_batch_is_multiplied():
    arguments = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert GradientAccumulation(steps=4).training_arguments(arguments) == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8,
    }  # fmt: skip
