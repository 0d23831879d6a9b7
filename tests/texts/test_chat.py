"""Conversations: the files that hold them, which tokens count, and how a run learns. The contract: test_formats.py."""

import csv
import gzip
import hashlib
import io
import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from workbench.base.errors import ConfigurationError
from workbench.base.tokens import IGNORED
from workbench.journal.record import Status
from workbench.models import load
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.models.load import load_config, load_model, load_tokenizer, quiet
from workbench.models.source import locate
from workbench.prediction.predict import predict
from workbench.techniques import DataLoading, GradientAccumulation, Padding, SequenceLength, Streaming
from workbench.techniques.sequence_length import cut_rows
from workbench.texts import corpus
from workbench.texts.chat import label_tokens
from workbench.training.job import prepare
from workbench.training.run import run
from workbench.training.trainer import collate
from workbench.training.world import World

CHATML = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# as some models of reasoning have it: what was thought is told in the last answer alone
FORGETFUL = (
    "{% for message in messages %}{{ message.role + ':' }}"
    "{{ message.content if loop.last else message.content.split('|')[-1] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def said(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CHATS = [said(f"What is {n} and 1?", f"It is {n + 1}.", "Sure?", "Yes, quite 🙂 sure.") for n in range(60)]


def tokenizer_with(template):
    tokenizer = load_tokenizer(locate("gpt2-tiny"))
    tokenizer.chat_template = template
    return tokenizer


def counted(row, tokenizer, loss="answers"):
    """What counts, with a bar between what does not follow each other; and the whole."""
    pairs = label_tokens(json.dumps(row), tokenizer, loss)
    assert {label for _, label in pairs} <= {IGNORED, *(token for token, _ in pairs)}
    assert all(label in (token, IGNORED) for token, label in pairs)
    runs, last = [], IGNORED
    for token, label in pairs:
        if label != IGNORED:
            runs = [*runs, []] if last == IGNORED else runs
            runs[-1].append(token)
        last = label
    return [tokenizer.decode(run) for run in runs], tokenizer.decode([token for token, _ in pairs])


def table(rows, separator):
    """The rows with a separator between their fields, in which lists are JSON."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator)
    writer.writerow(rows[0])
    writer.writerows([value if isinstance(value, str) else json.dumps(value) for value in row.values()] for row in rows)
    return file.getvalue()


def written(folder, kind, rows):
    path = folder / f"own.{kind}"
    if kind == "saved":
        with quiet():
            Dataset.from_list(rows).save_to_disk(path)
    elif kind == "parquet":
        with quiet():
            Dataset.from_list(rows).to_parquet(path)
    else:
        lines = "\n".join(json.dumps(row) for row in rows)
        contents = {"json": json.dumps(rows), "csv": table(rows, ","), "tsv": table(rows, "\t")}
        data = contents.get(kind.removesuffix(".gz"), lines).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    return str(path)


# ---- what counts ----


def test_of_messages_the_assistants_turns_count_with_their_end():
    answers, whole = counted({"messages": said("Hi", "Hello.", "And?", "Bye.")}, tokenizer_with(CHATML))
    assert answers == ["Hello.<|end|>\n", "Bye.<|end|>\n"]
    assert (
        whole
        == "<|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n<|user|>\nAnd?<|end|>\n<|assistant|>\nBye.<|end|>\n"
    )


def test_a_template_that_marks_what_is_generated_is_taken_at_its_word():
    row = {"messages": [{"role": "system", "content": "Be kind."}, *said("Hi", "Hello.", "And?", "Bye.")]}
    answers, whole = counted(row, tokenizer_with(MARKED))
    assert answers == ["Hello.<|end|>", "Bye.<|end|>"]
    assert whole == counted(row, tokenizer_with(CHATML))[1]


def test_the_ids_are_those_that_the_tokenizer_gives_the_conversation():
    tokenizer = tokenizer_with(CHATML)
    pairs = label_tokens(json.dumps({"messages": CHATS[0]}), tokenizer, "answers")
    assert [token for token, _ in pairs] == tokenizer.apply_chat_template(CHATS[0], return_dict=False)


def test_without_a_template_a_simple_one_serves_and_the_end_of_text_ends_an_answer():
    answers, whole = counted({"messages": said("Hi", "Hello.")}, gpt2_tokenizer())
    assert whole == "user: Hi\nassistant: Hello.<|endoftext|>\n"
    assert answers == [" Hello.<|endoftext|>\n"]


def test_of_two_texts_the_second_counts_and_both_stay_as_they_are(subtests):
    for completion in (" blue.", ""):
        with subtests.test(completion=completion):
            answers, whole = counted({"prompt": "The sky is", "completion": completion}, gpt2_tokenizer())
            assert answers == [f"{completion}<|endoftext|>"]
            assert whole == f"The sky is{completion}<|endoftext|>"


def test_where_a_token_joins_two_texts_it_counts():
    """As in TRL: the completion begins where the tokens of both differ from those of the prompt alone."""
    tokenizer = gpt2_tokenizer()
    answers, whole = counted({"prompt": "The sky is bl", "completion": "ue."}, tokenizer)
    assert whole == "The sky is blue.<|endoftext|>"
    assert answers == [" blue.<|endoftext|>"]


def test_of_messages_and_what_answers_them_the_answer_counts():
    row = {"prompt": said("Hi", "Hello.", "And?"), "completion": [{"role": "assistant", "content": "Bye."}]}
    assert counted(row, tokenizer_with(CHATML))[0] == ["Bye.<|end|>\n"]


def test_an_answer_that_is_not_to_be_learned_does_not_count(subtests):
    for name in ("weight", "train", "loss", "loss_weight"):
        for template, end in ((CHATML, "<|end|>\n"), (MARKED, "<|end|>")):
            with subtests.test(name=name, template=template):
                first, wrong, *rest = said("Hi", "Hello.", "And?", "Bye.")
                row = {"messages": [first, {**wrong, name: 0}, *rest]}
                answers, whole = counted(row, tokenizer_with(template))
                assert answers == [f"Bye.{end}"]
                assert "Hello." in whole


def test_tools_and_calls_are_written(subtests):
    call = {"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}
    row = {"messages": [*said("Hi"), {"role": "assistant", "tool_calls": [call]}], "tools": [{"name": "add"}]}
    answers, whole = counted(row, tokenizer_with(None))
    assert whole.startswith('tools: [{"name": "add"}]\nuser: Hi\n')
    assert answers == [f" {json.dumps([call])}<|endoftext|>\n"]
    writes_tools = "{% for tool in tools %}<{{ tool.name }}>{% endfor %}" + CHATML
    assert counted({**row, "messages": said("Hi", "Hello.")}, tokenizer_with(writes_tools))[1].startswith(
        "<add><|user|>"
    )


def test_what_a_template_does_not_write_is_said(tmp_path):
    thoughtful = [{**message, "reasoning_content": "Hm."} for message in said("Hi", "Hello.")]
    rows = [{"messages": thoughtful, "tools": [{"name": "add"}]}] * 20
    text = corpus.load_corpus(written(tmp_path, "jsonl", rows))
    assert text.entries == (("reasoning_content", 40), ("tools", 20))
    lost = corpus.remarks_of_template(text, tokenizer_with(CHATML))[1:]
    assert lost == (
        "reasoning_content of 40 messages left out: the chat template does not write it",
        "tools of 20 conversations left out: the chat template does not write it",
    )
    assert len(corpus.remarks_of_template(text, tokenizer_with(None))) == 2


def test_everything_counts_if_so_wanted():
    for template in (CHATML, MARKED, FORGETFUL):
        answers, whole = counted({"messages": said("Hi", "so|Hello.", "x", "y")}, tokenizer_with(template), "all")
        assert answers == [whole]


def test_a_template_that_rewrites_the_beginning_is_refused():
    once = said("Hi", "Hm|Hello.")
    assert counted({"messages": once}, tokenizer_with(FORGETFUL))[0] == ["Hm|Hello.\n"]
    with pytest.raises(ValueError, match="the beginning of a conversation otherwise than the whole"):
        counted({"messages": [*once, *said("And?", "Hm|Bye.")]}, tokenizer_with(FORGETFUL))


# ---- what files hold them ----


KINDS = ("json", "parquet", "saved", "csv", "tsv", "jsonl.gz", "json.gz")
SHARED = [[{"from": said["role"], "value": said["content"]} for said in chat] for chat in CHATS]
ROWS = {
    "messages": [{"id": n, "messages": chat} for n, chat in enumerate(CHATS)],
    "ShareGPT": [{"conversations": chat, "tools": [{"name": "add"}]} for chat in SHARED],
    "texts": [{"id": n, "prompt": "one, two,", "completion": f" {n}"} for n in range(40)],
    "exchange": [{"prompt": chat[:1], "completion": chat[1:2]} for chat in CHATS],
    "instructions": [{"instruction": f"What is {n}?", "input": "", "output": f'"{n}",\n'} for n in range(40)],
}


def test_every_kind_gives_the_same_conversations(tmp_path, subtests):
    for shape, rows in ROWS.items():
        folder = tmp_path / shape
        folder.mkdir()
        lines = corpus.load_corpus(written(folder, "jsonl", rows))
        for kind in KINDS if shape != "exchange" else KINDS[:3]:
            with subtests.test(shape=shape, kind=kind):
                own = corpus.load_corpus(written(folder, kind, rows))
                assert own.loss == "answers"
                assert own.sha256 == lines.sha256
                assert list(own.train) == list(lines.train)
                assert own.held_out == lines.held_out
                assert own.documents == len(rows) == len(list(own.train)) + len(own.held_out.split("\n"))
                assert len(own.held_out.split("\n")) == len(rows) // 10


def test_nulls_are_left_out_and_what_is_null_in_a_message_too(tmp_path):
    tool = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    rows = [{"messages": None}, {"messages": [{**said("a")[0], "name": None}, tool]}, *({"messages": c} for c in CHATS)]
    own = corpus.load_corpus(written(tmp_path, "jsonl", rows))
    assert own.remarks == ("1 null texts left out",)
    assert json.loads(next(iter(own.train))) == {
        "messages": [said("a")[0], {"role": "assistant", "tool_calls": [{"name": "add"}]}]
    }


# ---- blocks ----


@pytest.fixture
def few_chats(tmp_path):
    return written(tmp_path, "jsonl", [{"messages": chat} for chat in CHATS])


@pytest.fixture
def chats(tmp_path):
    return written(tmp_path, "jsonl", [{"messages": chat} for chat in CHATS * 4])


def test_conversations_are_packed_one_after_the_other_with_their_labels(chats, subtests):
    own = corpus.load_corpus(chats)
    for name, template in (("plain", CHATML), ("marked", MARKED), ("none", None)):
        with subtests.test(template=name):
            tokenizer = tokenizer_with(template)
            blocks = corpus.make_blocks(own, tokenizer, 24, 4)
            pairs = [pair for line in own.train for pair in label_tokens(line, tokenizer, "answers")]
            expected = [pairs[start : start + 24] for start in range(0, len(pairs) - 23, 24)]
            expected = [block for block in expected if any(label != IGNORED for _, label in block[1:])]
            assert pairs_of(blocks.train) == expected[: len(expected) // 4 * 4]
            assert blocks.held_out.column_names == ["input_ids", "labels"]
            assert all(any(label != IGNORED for label in row["labels"][1:]) for row in blocks.held_out)
            assert "loss counts answers" in blocks.remarks[0]
            assert ("no chat template" in blocks.remarks[0]) is (template is None)


def test_the_tokens_are_made_once_for_a_template_and_what_counts(chats, runs_folder):
    for name in (chats, f"{chats}:loss=all"):
        for template in (CHATML, MARKED, CHATML):
            corpus.make_blocks(corpus.load_corpus(name), tokenizer_with(template), 24, 4)
    assert len(list((runs_folder / "tokens").iterdir())) == 4


def test_a_text_has_the_tokens_that_it_always_had():
    """Reckoned before there were conversations."""
    blocks = corpus.make_blocks(corpus.load_corpus("shakespeare"), gpt2_tokenizer(), 64, 4)
    assert blocks.train.column_names == blocks.held_out.column_names == ["input_ids"]
    digests = [
        hashlib.sha256(str(part["input_ids"][:]).encode()).hexdigest()[:16] for part in (blocks.train, blocks.held_out)
    ]
    assert (len(blocks.train), *digests) == (5504, "5a31cdca55070030", "deff883f5c91f5ec")
    assert blocks.remarks == ()


def test_the_collator_takes_labels_where_they_are():
    rows = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, 2, IGNORED]},
        {"input_ids": [4, 5, 6], "labels": [IGNORED] * 3},
    ]
    assert collate(rows)["labels"].tolist() == [row["labels"] for row in rows]
    plain = collate([{"input_ids": row["input_ids"]} for row in rows])
    assert torch.equal(plain["labels"], plain["input_ids"])


# ---- runs ----


@pytest.mark.values
@pytest.mark.dear
def test_the_loss_of_a_run_is_that_of_the_answers(recipe, few_chats):
    """Of a single batch, reckoned by hand: the mean over the tokens that count, in whatever micro-batches."""
    recipe = replace(recipe, corpus=few_chats, steps=1)
    source = locate(recipe.model)
    model, tokenizer = load_model(source, load_config(source)).eval(), load_tokenizer(source)
    own = corpus.load_corpus(few_chats)
    size = len(corpus.make_blocks(own, tokenizer, recipe.sequence_length, 1).train)
    blocks = corpus.make_blocks(own, tokenizer, recipe.sequence_length, size)
    ids, labels = (torch.tensor(blocks.train[name][:]) for name in ("input_ids", "labels"))
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED).item()
    for techniques in ((), (GradientAccumulation(steps=size),), (DataLoading(num_workers=0),)):
        record = run(replace(recipe, effective_batch_size=size, techniques=techniques), device="cpu")
        assert record.losses == pytest.approx([expected], rel=1e-4)
    everything = run(replace(recipe, effective_batch_size=size, corpus=f"{few_chats}:loss=all"), device="cpu")
    assert everything.losses[0] != pytest.approx(expected, rel=1e-3)
    assert "the loss counts answers of the conversations" in " ".join(record.warnings)
    assert record.data_sha256 == everything.data_sha256


@pytest.mark.values
def test_what_does_not_count_is_not_learned(recipe, tmp_path):
    """Answers are always the same, questions never: with the answers alone the loss falls to nearly nothing."""
    rows = [
        {"prompt": f"{n * 7919 % 1000} {n * 104729 % 997} and", "completion": " the end of it all"} for n in range(500)
    ]
    recipe = replace(recipe, corpus=written(tmp_path, "jsonl", rows), steps=40, learning_rate=1e-2)
    answers = run(recipe, device="cpu")
    everything = run(replace(recipe, corpus=f"{recipe.corpus}:loss=all"), device="cpu")
    assert answers.held_out_loss < 0.3 < 1 < everything.held_out_loss


@pytest.mark.values
def test_what_is_exact_finds_the_same_losses_held_out_ones_too(recipe, chats):
    """However many rows are evaluated at once elsewhere: a mean of their means would be another."""
    recipe = replace(recipe, corpus=chats, steps=2)
    plain, accumulated = (run(each, device="cpu") for each in (recipe, recipe | GradientAccumulation(steps=4)))
    assert accumulated.losses == pytest.approx(plain.losses, rel=1e-5)
    assert accumulated.held_out_loss_before == pytest.approx(plain.held_out_loss_before, rel=1e-6)
    assert accumulated.held_out_loss == pytest.approx(plain.held_out_loss, rel=1e-5)
    assert plain.recipe.evaluation_batch_size == 1
    asked = run(replace(recipe, evaluation_batch_size=3), device="cpu")
    assert asked.recipe.evaluation_batch_size == 3


# ---- techniques with rows of their own ----


def rows_of(recipe, *techniques):
    recipe = replace(recipe, techniques=techniques)
    data = prepare(recipe, World.find("cpu")).data
    return [*data["train_dataset"]], data["data_collator"]


def pairs_of(rows):
    return [list(zip(row["input_ids"], row["labels"], strict=True)) for row in rows]


def test_padding_makes_a_row_of_each_conversation(recipe, chats, subtests):
    """In pieces where it is longer; without those in which nothing counts."""
    recipe = replace(recipe, corpus=chats, sequence_length=24)
    tokenizer = load_tokenizer(locate(recipe.model))
    conversations = [label_tokens(line, tokenizer, "answers") for line in corpus.load_corpus(chats).train]
    assert max(map(len, conversations)) > 24  # or nothing is cut
    pieces = [pairs[start : start + 24] for pairs in conversations for start in range(0, len(pairs), 24)]
    expected = [piece for piece in pieces if any(label != IGNORED for _, label in piece[1:])]
    for dynamic in (True, False):
        with subtests.test(dynamic=dynamic):
            rows, collate_rows = rows_of(recipe, Padding(dynamic=dynamic))
            shown = [
                [pair for pair, here in zip(pairs, row["attention_mask"], strict=True) if here]
                for pairs, row in zip(pairs_of(rows), rows, strict=True)
            ]
            assert shown == expected[: len(expected) // 8 * 8]
            lengths = {len(piece) for piece in shown} if dynamic else {24}
            assert {len(row["input_ids"]) for row in rows} == lengths
            batch = collate_rows(rows[:8])
            assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()
            kept = batch["labels"] != IGNORED
            assert torch.equal(batch["labels"][kept], batch["input_ids"][kept])
            assert kept.sum() == sum(label != IGNORED for piece in expected[:8] for _, label in piece)


def test_a_piece_of_a_single_label_is_none():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]], "labels": [[IGNORED, 2, 3]]})
    assert pairs_of(cut_rows(rows, 2)) == [[(1, IGNORED), (2, 2)]]


def test_a_stream_has_the_blocks_that_are_packed(recipe, chats):
    packed, _ = rows_of(replace(recipe, corpus=chats))
    streamed, _ = rows_of(replace(recipe, corpus=chats), Streaming(shuffle_buffer=8))
    assert sorted(pairs_of(streamed)) == sorted(pairs_of(packed))
    assert pairs_of(streamed) != pairs_of(packed)


def test_of_shorter_pieces_those_stay_in_which_something_counts(recipe, chats):
    packed, _ = rows_of(replace(recipe, corpus=chats))
    cut, _ = rows_of(replace(recipe, corpus=chats), SequenceLength(tokens=8))
    pieces = [pairs[start : start + 8] for pairs in pairs_of(packed) for start in range(0, len(pairs), 8)]
    assert pairs_of(cut) == [piece for piece in pieces if any(label != IGNORED for _, label in piece[1:])]
    assert len(cut) < len(pieces)


@pytest.mark.values
@pytest.mark.parametrize("technique", [Padding(), Streaming(), SequenceLength(tokens=16)], ids=lambda t: t.name)
def test_a_run_learns_from_them(recipe, chats, technique):
    record = run(replace(recipe, corpus=chats, steps=4, techniques=(technique,)), device="cpu")
    assert record.status is Status.OK, record.error
    assert record.held_out_loss < record.held_out_loss_before - 0.1


def test_more_than_can_be_held_is_refused_before_loading(recipe, chats, monkeypatch, subtests):
    monkeypatch.setattr(load, "load_model", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(corpus, "IN_MEMORY_CHARACTERS", 10_000)
    for technique in (Padding(), Streaming()):
        message = rf"corpus: {technique.name} cuts .* more than 10,000 characters"
        with subtests.test(technique.name), pytest.raises(ConfigurationError, match=message):
            run(replace(recipe, corpus=chats, techniques=(technique,)), device="cpu")


def test_padded_conversations_are_predicted_as_they_are_measured(recipe, few_chats):
    """Of unequal rows the longest come first, in the run and in the prediction."""
    recipe = replace(recipe, corpus=few_chats, steps=2, evaluation_batch_size=1, techniques=(Padding(),))
    record = run(recipe, device="cpu", longest_first=True)
    predicted = predict(recipe, "cpu", engine="shadow")
    assert predicted.peak_allocated_bytes == pytest.approx(record.peak_allocated_bytes, rel=5e-3)


def test_a_sample_begins_with_the_first_question_that_is_held_out(chats):
    assert corpus.prompt(corpus.load_corpus(chats)) == "What is 36 and 1?"
