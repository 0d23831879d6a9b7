from dataclasses import replace
from itertools import chain

import pytest
import torch

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category, Phase
from workbench.recipe import Recipe
from workbench.run.job import prepare
from workbench.run.trainer import argument_values, prepare_data
from workbench.techniques import BatchSize, GradientAccumulation, SequenceLength

LENGTHS = pytest.mark.parametrize("tokens", [8, 16])


@LENGTHS
def test_the_same_text_is_cut_into_pieces_and_the_held_out_text_is_not(recipe, tokens):
    asked = recipe | SequenceLength(tokens=tokens)
    blocks = prepare(asked, torch.device("cpu")).blocks
    data = prepare_data(asked, blocks)
    rows = data["train_dataset"]["input_ids"]
    assert {len(row) for row in rows} == {tokens}
    assert list(chain(*rows)) == list(chain(*blocks.train["input_ids"]))
    assert {len(row) for row in data["eval_dataset"]["input_ids"]} == {32}


@LENGTHS
def test_the_tokens_seen_stay_equal_in_more_steps(recipe, fine_tuned, tokens):
    plain, short = fine_tuned(recipe), fine_tuned(recipe | SequenceLength(tokens=tokens))
    assert short.micro_batch_size == plain.micro_batch_size == 8
    assert short.steps_done == len(short.losses) == plain.steps_done * 32 // tokens
    assert short.tokens_seen == plain.tokens_seen == recipe.steps * 8 * 32


def test_tokens_stay_equal_over_more_than_one_epoch(recipe, fine_tuned, text_file, tmp_path):
    brief = tmp_path / "short.txt"
    brief.write_text(text_file.read_text(encoding="utf-8")[:1800], encoding="utf-8")
    repeated = replace(recipe, corpus=str(brief), steps=4)
    assert fine_tuned(repeated | SequenceLength(tokens=8)).tokens_seen == fine_tuned(repeated).tokens_seen


@LENGTHS
def test_held_out_losses_are_of_the_same_blocks(recipe, fine_tuned, tokens):
    plain, short = fine_tuned(recipe), fine_tuned(recipe | SequenceLength(tokens=tokens))
    assert short.held_out_loss_before == pytest.approx(plain.held_out_loss_before, rel=1e-6)
    assert short.held_out_loss < short.held_out_loss_before
    assert short.held_out_loss != pytest.approx(plain.held_out_loss, rel=1e-3)


@LENGTHS
def test_activations_and_logits_shrink_with_the_length(recipe, fine_tuned, tokens):
    plain = fine_tuned(recipe).maximum_by_category
    short = fine_tuned(recipe | SequenceLength(tokens=tokens)).maximum_by_category
    for category in SequenceLength.attacks:
        assert short[category] / plain[category] == pytest.approx(tokens / 32, rel=0.05)
    for category in (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES):
        assert short[category] == plain[category]


def test_evaluation_on_the_long_blocks_does_not_become_the_peak(recipe, fine_tuned):
    record = fine_tuned(recipe | SequenceLength(tokens=8))
    assert record.peak_phase != Phase.EVALUATION
    assert record.by_phase[Phase.EVALUATION] < fine_tuned(recipe).by_phase[Phase.EVALUATION]


def test_evaluation_takes_as_many_tokens_at_once_as_training_but_at_least_one_block(recipe):
    def batch(*techniques):
        return argument_values(replace(recipe, techniques=techniques), 1e-3)["per_device_eval_batch_size"]

    assert batch() == 8
    assert batch(GradientAccumulation(steps=4)) == 2
    assert batch(SequenceLength(tokens=8)) == 2
    assert batch(SequenceLength(tokens=8), BatchSize(size=2)) == 1


def test_it_combines_with_a_smaller_batch_and_accumulation(recipe, fine_tuned):
    record = fine_tuned(recipe | SequenceLength(tokens=16) | BatchSize(size=4) | GradientAccumulation(steps=2))
    assert (record.micro_batch_size, record.gradient_accumulation_steps) == (2, 2)
    assert record.steps_done == recipe.steps * 2 * 2
    assert record.tokens_seen == fine_tuned(recipe).tokens_seen


@pytest.mark.parametrize(
    ("length", "tokens", "possible"), [(32, 12, "2, 4, 8, 16"), (32, 32, "2, 4, 8, 16"), (9, 2, "3")]
)
def test_a_length_that_is_no_equal_part_is_refused(length, tokens, possible):
    with pytest.raises(ConfigurationError) as caught:
        Recipe(sequence_length=length) | SequenceLength(tokens=tokens)
    message = str(caught.value)
    assert f"pieces of {tokens} tokens are not equal parts of the recipe's sequence_length of {length}" in message
    assert message.endswith(f"Possible lengths: {possible}.")


def test_a_prime_length_cannot_be_cut():
    with pytest.raises(ConfigurationError, match="none: use a longer one"):
        Recipe(sequence_length=7) | SequenceLength(tokens=2)


def test_one_token_has_nothing_to_predict():
    with pytest.raises(ConfigurationError, match="tokens must be an integer of at least 2, got 1"):
        SequenceLength(tokens=1)


def test_the_customary_learning_rate_falls_with_the_root_of_the_tokens_of_a_step(recipe):
    asked = replace(recipe, learning_rate=None) | SequenceLength(tokens=8)
    assert prepare(asked, torch.device("cpu")).learning_rate == pytest.approx(1e-3 / 2)
    assert prepare(replace(asked, learning_rate=3e-3), torch.device("cpu")).learning_rate == 3e-3
