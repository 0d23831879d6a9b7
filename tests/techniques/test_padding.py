from dataclasses import replace

import pytest
import torch

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.models.load import load_config, load_model, load_tokenizer
from workbench.models.source import locate
from workbench.prediction.predict import predict
from workbench.techniques import GradientAccumulation, Padding
from workbench.techniques.padding import make_examples, pad, pad_to
from workbench.texts import corpus
from workbench.training.run import run
from workbench.training.trainer import prepare_data

T = 32
FIXED, DYNAMIC, GROUPED = Padding(dynamic=False), Padding(), Padding(group_by_length=True)
KINDS = (FIXED, DYNAMIC, GROUPED)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(locate("gpt2-tiny"))


@pytest.fixture(scope="module")
def tiny():
    source = locate("gpt2-tiny")
    return load_model(source, load_config(source)).eval()


def rows_of(*lengths):
    tokens = [list(range(7, 7 + n)) for n in lengths]
    return [{"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)} for ids in tokens]


def test_every_paragraph_is_there_and_ends_with_the_end_of_text(text_file, tokenizer):
    text = text_file.read_text(encoding="utf-8")
    examples = make_examples(text, tokenizer, T, 1)
    end = tokenizer.eos_token_id
    ids = [token for row in examples for token in row["input_ids"]]
    paragraphs = [p.strip() for p in text.split("\n\n") if p.strip()]
    lone = [p for p in paragraphs if len(tokenizer(p)["input_ids"]) % T == 0]  # their end would be a piece of one token
    assert ids.count(end) == len(paragraphs) - len(lone) > 300
    assert "".join(tokenizer.decode(ids, skip_special_tokens=True).split()) == "".join("".join(paragraphs).split())
    assert all(1 < len(row["input_ids"]) == row["length"] <= T for row in examples)
    assert len(make_examples(text, tokenizer, T, 8)) == len(examples) // 8 * 8


def test_padding_has_no_label_and_the_real_end_has_one(tokenizer):
    """The trap: with the end-of-text token as padding, masking every label equal to it masks the real ends too."""
    end = tokenizer.eos_token_id
    batch = pad(None, [{"input_ids": [5, 6, end]}, {"input_ids": [5, end]}])
    assert batch["labels"].tolist() == [[5, 6, end], [5, end, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    fixed = pad(None, [pad_to(row, 5) for row in rows_of(3, 2)])
    assert fixed["labels"].tolist() == [[7, 8, 9, -100, -100], [7, 8, -100, -100, -100]]


def test_a_padded_token_of_the_text_that_is_the_filler_keeps_its_label():
    assert pad(None, [{"input_ids": [0, 0, 4]}, {"input_ids": [0, 4]}])["labels"].tolist() == [[0, 0, 4], [0, 4, -100]]


def test_the_loss_is_that_of_the_examples_alone_whatever_the_padding(tiny, subtests):
    rows = rows_of(6, 4, 2)
    with torch.no_grad():
        alone = [(tiny(**pad(None, [row])).loss, len(row["input_ids"]) - 1) for row in rows]
    mean = sum(loss * predicted for loss, predicted in alone) / sum(predicted for _, predicted in alone)
    for length in (6, 9):
        with subtests.test(length=length):
            batch = pad(None, [pad_to(row, length) for row in rows])
            other = dict(batch, input_ids=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 4095))
            with torch.no_grad():
                together, with_other_filler = tiny(**batch).loss, tiny(**other).loss
            assert together.item() == pytest.approx(mean.item(), rel=1e-5)
            assert with_other_filler.item() == pytest.approx(together.item(), rel=1e-6)


def test_real_and_padding_tokens_are_counted_apart_and_it_learns(recipe, fine_tuned, subtests):
    plain = fine_tuned(recipe)
    for padding in KINDS:
        with subtests.test(padding=padding):
            padded = fine_tuned(recipe | padding)
            assert padded.padding_tokens > 0 or padding is GROUPED  # which begins with 48 examples of T tokens here
            seen = padded.tokens_seen + padded.padding_tokens
            assert seen == plain.tokens_seen if padding is FIXED else seen <= plain.tokens_seen
            assert padded.held_out_loss < padded.held_out_loss_before - 0.1


def test_dynamic_padding_wastes_less_and_groups_of_equal_length_least(recipe, fine_tuned):
    shares = {}
    for padding in KINDS:
        record = fine_tuned(replace(recipe, sequence_length=64) | padding)
        shares[padding] = record.padding_tokens / (record.tokens_seen + record.padding_tokens)
    assert shares[FIXED] > shares[DYNAMIC] > 2 * shares[GROUPED]


def test_fixed_and_dynamic_padding_are_the_same_training(recipe, fine_tuned):
    fixed, dynamic = fine_tuned(recipe | FIXED), fine_tuned(recipe | DYNAMIC)
    assert dynamic.tokens_seen == fixed.tokens_seen
    assert dynamic.losses == pytest.approx(fixed.losses, rel=2e-5)
    assert dynamic.held_out_loss == pytest.approx(fixed.held_out_loss, rel=2e-5)


def test_fixed_padding_takes_the_memory_of_full_blocks_or_more(recipe, fine_tuned):
    plain, fixed = fine_tuned(recipe), fine_tuned(recipe | FIXED)
    assert fixed.maximum_by_category[Category.ACTIVATIONS] >= plain.maximum_by_category[Category.ACTIVATIONS]


def test_the_examples_keep_their_length_for_grouping(recipe, tokenizer):
    blocks = corpus.make_blocks(corpus.load_corpus(recipe.corpus), tokenizer, T, 8)
    rows = prepare_data(recipe | GROUPED, blocks)["train_dataset"]
    assert rows["length"][:] == [len(ids) for ids in rows["input_ids"]]
    arguments = (recipe | GROUPED).training_arguments()
    assert arguments["train_sampling_strategy"] == "group_by_length"
    assert arguments["length_column_name"] == "length"


def test_grouping_lowers_no_peak_and_dealing_out_by_cost_does(recipe):
    asked = replace(recipe, sequence_length=64, steps=2) | GradientAccumulation(steps=4)
    widest = run(asked | DYNAMIC, device="cpu", longest_first=True)
    grouped = run(asked | GROUPED, device="cpu")
    balanced = replace(asked | DYNAMIC, arguments={"train_sampling_strategy": "batch_rebalance"})
    assert grouped.peak_allocated_bytes == pytest.approx(widest.peak_allocated_bytes, rel=0.01)
    assert run(balanced, device="cpu").peak_allocated_bytes < 0.8 * widest.peak_allocated_bytes
    with pytest.raises(ConfigurationError, match="longest_first: .*has its own order"):
        run(balanced, device="cpu", longest_first=True)
    with pytest.raises(ConfigurationError, match="unequal numbers of rows.*workbench scan FILE"):
        predict(balanced, "cpu")


def test_groups_of_what_is_equally_long_anyway_are_refused():
    with pytest.raises(ConfigurationError, match="group_by_length changes nothing if every example is padded to T"):
        Padding(dynamic=False, group_by_length=True)
