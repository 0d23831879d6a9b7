"""The scan: against the Trainer's own batches, with planted outliers, and what no scan can be made of."""

import json
import os
import random
import tracemalloc
from dataclasses import dataclass, replace
from itertools import product

import datasets
import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from workbench.__main__ import main
from workbench.advise import scan as module
from workbench.advise.scan import GAPS, scan, training_order
from workbench.base.errors import ConfigurationError
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.recipe import Recipe
from workbench.techniques import Allocator, GradientAccumulation, Padding, PrefixTuning, SequenceLength, Streaming
from workbench.texts import readers
from workbench.texts import source as reading
from workbench.texts.chat import label_tokens

WORDS = ["when", "shall", "we", "three", "meet", "again", "in", "thunder", "lightning", "or", "in", "rain"]
ROWS_OF_FILE = reading.rows_of_file


@dataclass(frozen=True)
class Needed:
    """A megabyte for a token of a micro-batch."""

    need_bytes: int


@pytest.fixture
def asked(monkeypatch):
    """Of every prediction the micro-batch, the length and whether there is padding; none is made."""
    found = []

    def predict(recipe, gpu, *, padding):
        size = recipe.training_arguments()["per_device_train_batch_size"]
        found.append((size, recipe.sequence_length, padding))
        return Needed(size * recipe.sequence_length * 10**6)

    monkeypatch.setattr(module.prediction, "predict", predict)
    monkeypatch.setattr(module.prediction, "warm_predictions", lambda gpu: None)
    return found


def written(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def words(count, seed=0):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(count))


def tokens(text):
    return len(gpt2_tokenizer()(text, verbose=False)["input_ids"])


def recipe(corpus, **fields):
    return Recipe(**{"model": "gpt2", "corpus": str(corpus), "effective_batch_size": 4, "seed": 42, **fields})


# ---- the longest ----


def test_planted_outliers_are_named_100_of_100(tmp_path, asked):
    chosen = random.Random(1)
    planted = sorted(chosen.sample(range(5000), 100))
    texts = [words(chosen.randrange(5, 60), row) for row in range(5000)]
    for row in planted:
        texts[row] = words(chosen.randrange(150, 400), row)
    found = scan(recipe(written(tmp_path / "rows.jsonl", texts)), "t4", longest=100)
    assert sorted(int(one["place"].removeprefix("line ")) - 1 for one in found.longest) == planted
    assert [one["tokens"] for one in found.longest] == sorted((tokens(texts[r]) for r in planted), reverse=True)


def test_the_most_bytes_are_not_the_most_tokens(tmp_path, asked):
    """Fewer bytes of digits are more tokens than many of spaces and words."""
    texts = ["in the morning " * 40, "0 1 2 3 4 5 6 7 8 9 " * 15, "short", "also short"]
    found = scan(recipe(written(tmp_path / "rows.jsonl", texts)), "t4")
    assert len(texts[0]) > len(texts[1])
    assert found.longest[0] == {"place": "line 2", "tokens": tokens(texts[1]), "step": 1}


def test_lines_are_those_of_the_file_and_rows_those_of_a_table(tmp_path, asked):
    texts = ["a", "b", words(90), "c", "d"]
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n\n" + "\n\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    assert scan(recipe(blank), "t4").longest[0]["place"] == "line 7"
    table = tmp_path / "rows.csv"
    table.write_text('id,body\n1,"a\nb"\n2,b\n3,c\n4,"' + texts[2] + '"\n', encoding="utf-8")
    assert scan(recipe(f"{table}:text=body"), "t4").longest[0]["place"] == "line 6"
    parquet = tmp_path / "folder" / "part-2.parquet"
    parquet.parent.mkdir()
    datasets.Dataset.from_dict({"text": texts}).to_parquet(parquet)
    assert scan(recipe(parquet), "t4").longest[0]["place"] == "row 3"
    datasets.Dataset.from_dict({"text": ["x", "y"]}).to_parquet(parquet.with_name("part-1.parquet"))
    assert scan(recipe(parquet.parent), "t4").longest[0]["place"] == "part-2.parquet, row 3"


def test_texts_are_not_held(tmp_path):
    path = written(tmp_path / "rows.jsonl", (words(2000, n % 50) for n in range(1000)))  # 10 MB
    source = module.row_source(recipe(path))
    tracemalloc.start()
    counts, empty = module._count_tokens(source, CountsNothing())
    assert (len(counts), empty) == (1000, 0)
    assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    tracemalloc.stop()


class CountsNothing:
    """In place of a tokenizer, so that only the reading is looked at."""

    backend_tokenizer = property(lambda self: self)

    def no_truncation(self):
        pass

    def encode_batch_fast(self, texts):
        return texts


# ---- the order ----


class Counted(torch.nn.Module):
    """A model that draws random numbers, as dropout does."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, row, labels=None):
        return {"loss": (self.weight * torch.rand(1)).sum()}


def accumulated(recipe, steps):
    return recipe | GradientAccumulation(steps=steps) if steps > 1 else recipe


def epoch(recipe, lengths):
    return [int(row) for batch in training_order(recipe, lengths) for row in batch]


def rows_of_a_training(lengths, size, together, seed, folder, strategy):
    """The rows of an epoch, in the order in which a Trainer trains with them."""
    taken = []

    def collate(batch):
        taken.extend(example["row"] for example in batch)
        return {"row": torch.tensor([example["row"] for example in batch])}

    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=size, gradient_accumulation_steps=together, num_train_epochs=1,
        seed=seed, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        train_sampling_strategy=strategy, remove_unused_columns=False,
    )  # fmt: skip
    data = datasets.Dataset.from_dict({"row": range(len(lengths)), "length": lengths})
    Trainer(Counted(), arguments, train_dataset=data, data_collator=collate).train()
    return taken


def test_the_order_is_that_of_a_trainer_that_trains(tmp_path, subtests):
    for (rows, size, together, seed), strategy in product(
        ((37, 4, 1, 42), (64, 8, 2, 0), (10, 3, 3, 7)), ("random", "batch_rebalance")
    ):
        lengths = np.random.default_rng(rows).integers(1, 99, rows)
        with subtests.test(rows=rows, size=size, together=together, seed=seed, strategy=strategy):
            wanted = accumulated(recipe("rows.jsonl", effective_batch_size=size * together, seed=seed), together)
            wanted = replace(wanted, arguments={"train_sampling_strategy": strategy})
            order = epoch(wanted, lengths)
            assert rows_of_a_training(lengths, size, together, seed, tmp_path, strategy) == order


def test_the_step_is_that_in_which_the_row_comes(tmp_path, asked, subtests):
    path = written(tmp_path / "rows.jsonl", [words(80 if n == 29 else 5 + n % 3, n) for n in range(41)])
    for together in (1, 2):
        with subtests.test(together=together):
            asked.clear()
            wanted = accumulated(recipe(path), together)
            order, result, size = epoch(wanted, np.ones(41, int)), scan(wanted, "t4"), 4 // together
            assert result.longest[0]["step"] == order.index(29) // 4 + 1
            assert result.steps == 11
            assert asked == [(size, result.longest[0]["tokens"], True)]


# ---- what fits ----

ROOM = 15_633_680_896  # bytes of a T4


def test_the_cap_is_the_longest_that_fits_and_says_what_it_cuts(tmp_path, asked):
    texts = [words(20 + n, n) for n in range(300)] + [words(900)]
    path, size = written(tmp_path / "rows.jsonl", texts), 64
    found = scan(recipe(path, effective_batch_size=size), "t4")
    lengths, cap = [tokens(text) for text in texts], found.cap["tokens"]
    assert not found.fits
    assert cap * size * 10**6 * (1 + GAPS) <= ROOM < (cap + module.MULTIPLE) * size * 10**6 * (1 + GAPS)
    assert found.cap["cut_rows"] == sum(length > cap for length in lengths) > 1
    assert found.cap["cut_tokens"] == sum(length - cap for length in lengths if length > cap)
    assert found.cap["packed_bytes"] == cap * size * 10**6 < found.cap["needed_bytes"]
    assert asked[-2:] == [(size, cap, True), (size, cap, False)]
    assert f"cuts {found.cap['cut_tokens']:,} tokens from {found.cap['cut_rows']:,} rows (" in str(found)
    assert "plan gpt2 --corpus" in str(found)


def test_without_gaps_more_fits(tmp_path, asked):
    path = written(tmp_path / "rows.jsonl", [words(20 + n, n) for n in range(300)])
    with_gaps = scan(recipe(path, effective_batch_size=64), "t4")
    without = scan(recipe(path, effective_batch_size=64) | Allocator(), "t4")
    assert (with_gaps.gaps, without.gaps) == (GAPS, 0)
    assert with_gaps.needed_bytes == round(without.needed_bytes * (1 + GAPS))
    assert with_gaps.cap["tokens"] < without.cap["tokens"] == ROOM // 64 // 10**6 // 8 * 8


def test_what_other_orders_need_is_said_where_it_does_not_fit(tmp_path, asked):
    """Grouped, the first batch is a rectangle as large as any; dealt out by cost, a long row has few beside it."""
    texts = [words(20 + n % 30, n) for n in range(200)] + [words(800, n) for n in range(8)]
    path, lengths = written(tmp_path / "rows.jsonl", texts), np.array([tokens(text) for text in texts])
    asking = recipe(path, effective_batch_size=64) | GradientAccumulation(steps=2)
    found = scan(asking, "t4")
    grouped = replace(asking, arguments={"train_sampling_strategy": "group_by_length"})
    assert lengths[training_order(grouped, lengths)[0]].max() == found.longest[0]["tokens"]
    balanced = replace(asking, arguments={"train_sampling_strategy": "batch_rebalance"})
    costs = [len(batch) * lengths[batch].max() for batch in training_order(balanced, lengths)]
    assert found.balanced["rows"] * found.balanced["tokens"] == max(costs) < 32 * found.longest[0]["tokens"]
    assert found.balanced["needed_bytes"] == round(max(costs) * 10**6 * (1 + GAPS)) < found.limit_bytes
    assert f"at most {found.balanced['rows']} × {found.balanced['tokens']} tokens at once" in str(found)
    assert '"group_by_length" needs as much' in str(found)
    for ordered in (grouped, balanced):
        with pytest.raises(ConfigurationError, match="leave train_sampling_strategy out"):
            scan(ordered, "t4")


def test_what_fits_is_predicted_once_and_read_twice(tmp_path, asked, monkeypatch):
    path, read = written(tmp_path / "rows.jsonl", [words(n + 1, n) for n in range(50)]), []
    monkeypatch.setattr(reading, "rows_of_file", lambda *asked: read.append(asked) or ROWS_OF_FILE(*asked))
    found = scan(recipe(path), "t4")
    assert found.fits
    assert found.cap is None
    assert (len(asked), len(read)) == (1, 4), "twice to look at its beginning, then for the lengths, and for the places"
    assert "it fits" in str(found)
    assert "What makes it fit" not in str(found)


def test_a_row_beyond_the_positions_is_a_finding(tmp_path, asked):
    path = written(tmp_path / "rows.jsonl", [words(1300), *(words(9, n) for n in range(9))])
    found = scan(recipe(path) | PrefixTuning(virtual_tokens=24), "t4")
    assert found.needed_bytes <= found.limit_bytes
    assert not found.fits
    assert (found.positions, found.cap["tokens"], found.cap["cut_rows"]) == (1000, 1000, 1)
    assert "beyond the 1,000 positions of gpt2" in str(found)


def test_where_not_even_the_shortest_fit_the_planner_is_named(tmp_path, asked):
    path = written(tmp_path / "rows.jsonl", [words(9, n) for n in range(5000)])
    found = scan(recipe(path, effective_batch_size=4096), "t4")
    assert (found.fits, found.cap) == (False, None)
    assert "Not even rows of 8 tokens fit" in str(found)


def test_empty_rows_are_said(tmp_path, asked):
    path = written(tmp_path / "rows.jsonl", ["a b", "", words(9), None, " \n", "c"])
    found = scan(recipe(path), "t4", longest=20)
    assert [one["tokens"] for one in found.longest] == sorted((one["tokens"] for one in found.longest), reverse=True)
    assert (len(found.longest), found.longest[-1]["tokens"]) == (6, 0)
    assert found.empty == 3
    assert found.longest[0]["place"] == "line 3"
    assert "3 rows are empty" in str(found)


# ---- what cannot be scanned ----


def refused(corpus, *techniques, **fields):
    with pytest.raises(ConfigurationError) as error:
        scan(replace(recipe(corpus, **fields), techniques=techniques), "t4")
    return str(error.value)


def test_a_stream_has_no_order(tmp_path, asked):
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", "hf://datasets/allenai/c4", str(tmp_path / "pipe")):
        assert "is a stream" in refused(name)
        assert "Write it to a file first" in refused(name)


def test_too_few_rows_and_rows_without_text(tmp_path, asked, subtests):
    for texts in ([], ["one row"], ["one", "two", "three"], ["", " ", "", None]):
        with subtests.test(texts=texts):
            assert "Give" in refused(written(tmp_path / "rows.jsonl", texts))
            assert asked == []


def test_a_file_that_cannot_be_read_is_refused_with_its_line(tmp_path, asked):
    assert "there is no file" in refused(tmp_path / "none.jsonl")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": 5}\n', encoding="utf-8")
    assert "line 2: 'text' holds a int" in refused(path)
    path.write_text('{"text": "a"}\n\n{"text": "b"\n', encoding="utf-8")
    assert "line 3 is not JSON" in refused(path)
    path.write_text('{"text": "a"}\n{"text": "\\ud800"}\n', encoding="utf-8")
    assert "line 2: character 1 is half of a surrogate pair" in refused(path)
    path.write_text('{"body": "a"}\n', encoding="utf-8")
    assert "rows.jsonl:text=COLUMN if one column holds the whole text" in refused(path)
    assert "rows.jsonl:text=text has no column 'text'" in refused(f"{path}:text=text")
    plain = tmp_path / "novel.txt"
    plain.write_text("a novel", encoding="utf-8")
    assert "plain text, which has no rows" in refused(plain)


def conversation(kind, size):
    """A row of that kind, in which the user says so many words."""
    if kind in ("prompt", "instruction"):
        return {kind: words(size), "completion" if kind == "prompt" else "output": " So be it."}
    speaker, said = ("from", "value") if kind == "conversations" else ("role", "content")
    return {kind: [{speaker: "user", said: words(size)}, {speaker: "assistant", said: "So be it."}]}


def test_of_conversations_the_rows_are_as_long_as_in_training(tmp_path, asked, subtests):
    for kind in ("messages", "conversations", "prompt", "instruction"):
        with subtests.test(kind=kind):
            path = tmp_path / f"{kind}.jsonl"
            rows = [conversation(kind, size) for size in [5] * 20 + [90, 400] + [7] * 26]
            rows[3] = dict.fromkeys(rows[3])  # a null
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            result = scan(recipe(path), "t4", longest=2)
            tokenizer, source = gpt2_tokenizer(), readers.find_text(str(path), "")
            lines = [text for _, text in source.rows() if not isinstance(text, readers.LeftOut)]
            counted = [len(label_tokens(line, tokenizer, "answers")) for line in lines]
            longest = [(row["place"], row["tokens"]) for row in result.longest]
            assert longest == [("line 22", max(counted)), ("line 21", counted[19])]
            assert (result.rows, result.empty) == (48, 1)
            order = epoch(result.recipe, np.ones(48, int))
            assert result.longest[0]["step"] == order.index(21) // result.recipe.effective_batch_size + 1


def test_a_conversation_that_its_template_cannot_write_is_refused_with_its_line(tmp_path, asked):
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}
    good = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n", encoding="utf-8")
    told = refused(tmp_path / "rows.jsonl")
    assert "rows.jsonl, line 2: the chat template cannot be used" in told
    assert "Correct the row" in told


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, asked, monkeypatch):
    path = written(tmp_path / "rows.jsonl", [words(900), *(words(20, n) for n in range(80))])

    def meanwhile(*asked):
        yield from ROWS_OF_FILE(*asked)
        written(tmp_path / "rows.jsonl", ["other"] * 90)

    monkeypatch.setattr(reading, "rows_of_file", meanwhile)
    assert "was changed while it was read" in refused(path, effective_batch_size=64)


def test_techniques_that_make_other_examples_are_refused(tmp_path, asked):
    path = written(tmp_path / "rows.jsonl", ["a"] * 9)
    for technique in (Padding(group_by_length=True), Streaming(), SequenceLength(tokens=64)):
        assert f"Leave {technique.name} out" in refused(path, technique)


def test_the_command_says_it_in_words_and_as_json(tmp_path, asked, capsys):
    path = written(tmp_path / "rows.jsonl", [words(n + 3, n) for n in range(20)])
    assert main(["scan", path, "--model", "gpt2", "--gpu", "t4", "--batch-size", "4", "--longest", "2"]) == 0
    said = capsys.readouterr().out
    assert "line 20" in said
    assert "seed 42" in said
    assert main(["scan", path, "--model", "gpt2", "--gpu", "t4", "--seed", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longest"][0]["place"] == "line 20"
    assert (found["rows"], found["fits"], found["recipe"]["seed"]) == (20, True, 1)
    assert main(["scan", path, "--gpu", "t3"]) == 2
    assert main(["scan", path, "--gpu", "t4", "--batch-size", "many"]) == 2
