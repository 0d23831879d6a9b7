"""Smaller batches and shorter sequences: as many tokens, in more steps."""

from dataclasses import replace
from itertools import chain

import pytest

from workbench.base.categories import Phase
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import BatchSize, GradientAccumulation, SequenceLength
from workbench.training.arguments import complete_arguments
from workbench.training.job import prepare
from workbench.training.world import World


def test_the_record_says_what_a_step_was(recipe, fine_tuned, subtests):
    for technique, micro_batch_size, steps in (
        (BatchSize(size=2), 2, 24), (BatchSize(size=4), 4, 12), (SequenceLength(tokens=8), 8, 24),
        (SequenceLength(tokens=16), 8, 12),
    ):  # fmt: skip
        with subtests.test(technique=technique):
            record = fine_tuned(recipe | technique)
            assert record.micro_batch_size == micro_batch_size
            assert record.gradient_accumulation_steps == 1
            assert record.steps_done == len(record.losses) == steps
            assert record.tokens_seen == 6 * 8 * 32


def test_tokens_stay_equal_over_more_than_one_epoch(repeated, fine_tuned):
    """A text of 18 blocks: the 2 beyond two batches of 8 are dropped for all."""
    for technique in (BatchSize(size=2), SequenceLength(tokens=8)):
        assert fine_tuned(repeated | technique).tokens_seen == fine_tuned(repeated).tokens_seen == 5 * 8 * 32


def test_it_is_the_recipe_of_that_batch(recipe, fine_tuned):
    """Of this text both keep all blocks, so it is the same run."""
    asked = recipe | BatchSize(size=4)
    written_out = replace(recipe, effective_batch_size=4, steps=12)
    assert fine_tuned(asked).losses == fine_tuned(written_out).losses


def test_a_smaller_batch_is_other_training_than_accumulation(recipe, fine_tuned):
    small, accumulated = (fine_tuned(recipe | t) for t in (BatchSize(size=4), GradientAccumulation(steps=2)))
    assert small.micro_batch_size == accumulated.micro_batch_size
    assert small.tokens_seen == accumulated.tokens_seen
    assert small.steps_done == 2 * accumulated.steps_done
    assert abs(small.held_out_loss - accumulated.held_out_loss) > 0.01
    assert small.peak_allocated_bytes <= accumulated.peak_allocated_bytes


def test_accumulation_splits_the_smaller_batch_of_shorter_sequences():
    recipe = Recipe(effective_batch_size=8, sequence_length=32, steps=6)
    both = recipe | SequenceLength(tokens=16) | BatchSize(size=4) | GradientAccumulation(steps=2)
    assert both.training_arguments() == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 6 * 2 * 2, "seed": 0,
    }  # fmt: skip


def test_they_train_together(recipe, fine_tuned):
    short = replace(recipe, steps=1)
    record = fine_tuned(short | SequenceLength(tokens=16) | BatchSize(size=4) | GradientAccumulation(steps=2))
    assert (record.micro_batch_size, record.gradient_accumulation_steps) == (2, 2)
    assert record.steps_done == 2 * 2
    assert record.tokens_seen == 8 * 32


def test_the_same_text_is_cut_into_pieces_and_the_held_out_text_is_not(recipe, subtests):
    for tokens in (8, 16):
        with subtests.test(tokens=tokens):
            asked = recipe | SequenceLength(tokens=tokens)
            job = prepare(asked, World.find("cpu"))
            rows = job.data["train_dataset"]["input_ids"]
            assert {len(row) for row in rows} == {tokens}
            assert list(chain(*rows)) == list(chain(*job.material.blocks.train["input_ids"]))
            assert {len(row) for row in job.data["eval_dataset"]["input_ids"]} == {32}


def test_shorter_sequences_learn_something_else(recipe, fine_tuned):
    plain, short = fine_tuned(recipe), fine_tuned(recipe | SequenceLength(tokens=8))
    assert short.held_out_loss != pytest.approx(plain.held_out_loss, rel=1e-3)


def test_evaluation_on_the_long_blocks_does_not_become_the_peak(recipe, fine_tuned):
    record = fine_tuned(recipe | SequenceLength(tokens=8))
    assert record.peak_phase != Phase.EVALUATION
    assert record.by_phase[Phase.EVALUATION] < fine_tuned(recipe).by_phase[Phase.EVALUATION]


def test_evaluation_takes_as_many_tokens_at_once_as_training_but_at_least_one_block(recipe):
    def batch(*techniques):
        return complete_arguments(replace(recipe, techniques=techniques), 1e-3)["per_device_eval_batch_size"]

    assert batch() == 8
    assert batch(GradientAccumulation(steps=4)) == 2
    assert batch(SequenceLength(tokens=8)) == 2
    assert batch(SequenceLength(tokens=8), BatchSize(size=2)) == 1


WORDS = {
    "effective_batch_size": (
        "batch_size: batches of {part} are not equal parts of the recipe's effective_batch_size of {whole}, so the "
        "runs could not see the same tokens. Possible: {possible}."
    ),
    "sequence_length": (
        "sequence_length: pieces of {part} are not equal parts of the recipe's sequence_length of {whole}, so the "
        "runs could not see the same tokens. Possible: {possible}."
    ),
}


def test_what_is_no_equal_part_is_refused_with_those_that_are(subtests):
    for field, whole, part, possible in (
        ("effective_batch_size", 8, 3, "1, 2, 4"),
        ("effective_batch_size", 8, 8, "1, 2, 4"),
        ("effective_batch_size", 6, 12, "1, 2, 3"),
        ("effective_batch_size", 1, 1, "none. Use a larger effective_batch_size"),
        ("sequence_length", 32, 12, "2, 4, 8, 16"),
        ("sequence_length", 32, 32, "2, 4, 8, 16"),
        ("sequence_length", 9, 2, "3"),
        ("sequence_length", 7, 2, "none. Use a larger sequence_length"),
    ):
        with subtests.test(field, whole=whole, part=part):
            technique = BatchSize(size=part) if field == "effective_batch_size" else SequenceLength(tokens=part)
            with pytest.raises(ConfigurationError) as caught:
                Recipe(**{field: whole}) | technique
            assert str(caught.value) == WORDS[field].format(whole=whole, part=part, possible=possible)


def test_accumulation_that_does_not_split_the_smaller_batch_is_refused():
    with pytest.raises(ConfigurationError, match="a batch of 2 cannot be split into 4 .* Possible steps .*: 2."):
        Recipe(effective_batch_size=8) | BatchSize(size=2) | GradientAccumulation(steps=4)


def test_one_token_has_nothing_to_predict():
    with pytest.raises(ConfigurationError, match="tokens must be an integer of at least 2, got 1"):
        SequenceLength(tokens=1)


def test_the_customary_learning_rate_falls_with_the_root_of_the_tokens_of_a_step(recipe):
    customary = replace(recipe, learning_rate=None)
    for technique in (SequenceLength(tokens=8), BatchSize(size=2)):
        assert prepare(customary | technique, World.find("cpu")).record.learning_rate == pytest.approx(1e-3 / 2)
    asked = replace(recipe, learning_rate=3e-3) | BatchSize(size=2)
    assert prepare(asked, World.find("cpu")).record.learning_rate == 3e-3
