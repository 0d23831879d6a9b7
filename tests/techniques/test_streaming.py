from dataclasses import replace

import pytest

from workbench.base.categories import Category
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.models.load import load_tokenizer
from workbench.models.source import locate
from workbench.techniques import GradientAccumulation, Streaming
from workbench.texts import corpus
from workbench.training.trainer import prepare_data


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate("gpt2-tiny"))


def streamed(recipe, tokenizer, **settings):
    blocks = corpus.make_blocks(corpus.load_corpus(recipe.corpus), tokenizer, recipe.sequence_length, 8)
    stream = prepare_data(recipe | Streaming(**settings), blocks)["train_dataset"]
    return [tuple(row) for row in blocks.train["input_ids"]], [tuple(row["input_ids"]) for row in stream]


def test_unshuffled_it_gives_the_packed_blocks_in_the_order_of_the_text(recipe, tokenizer, subtests):
    for length in (32, 100):
        with subtests.test(length=length):
            packed, stream = streamed(replace(recipe, sequence_length=length), tokenizer, shuffle_buffer=1)
            assert stream == packed
            assert len(packed) > 50


def test_so_it_does_for_the_embedded_text_and_gpt2s_own_tokeniser(recipe):
    shakespeare = replace(recipe, corpus="shakespeare", sequence_length=512)
    packed, stream = streamed(shakespeare, gpt2_tokenizer(), shuffle_buffer=1)
    assert stream == packed


def test_shuffled_it_gives_the_same_blocks_in_an_order_of_the_seed(recipe, tokenizer):
    orders = [streamed(replace(recipe, seed=seed), tokenizer, shuffle_buffer=16)[1] for seed in (0, 0, 1)]
    packed, _ = streamed(recipe, tokenizer)
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(packed)
    assert orders[0] == orders[1] != orders[2]


def test_the_loss_is_that_of_other_batches(recipe, fine_tuned):
    plain, stream = fine_tuned(recipe), fine_tuned(recipe | Streaming())
    assert stream.held_out_loss_before == plain.held_out_loss_before
    assert stream.held_out_loss == pytest.approx(plain.held_out_loss, rel=0.02)


def test_device_memory_does_not_change(recipe, fine_tuned):
    plain, stream = fine_tuned(recipe), fine_tuned(recipe | Streaming())
    batch = 2 * 8 * 32 * 8  # ids and labels; how many batches wait is not the same
    assert abs(stream.peak_allocated_bytes - plain.peak_allocated_bytes) <= batch
    for category in Category:
        assert abs(stream.maximum_by_category[category] - plain.maximum_by_category[category]) <= batch


def test_it_goes_on_after_the_end_of_the_text_in_whole_batches(repeated, fine_tuned):
    record = fine_tuned(repeated | Streaming())
    assert record.steps_done == 5
    assert record.tokens_seen == 5 * 8 * 32
    accumulated = fine_tuned(repeated | Streaming() | GradientAccumulation(steps=2))
    assert accumulated.losses == pytest.approx(record.losses, rel=2e-5)
