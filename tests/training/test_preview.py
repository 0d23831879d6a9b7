"""What is shown of a text before it is trained on: the tokens of a run, those that count, and what is cut."""

import json

import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.tokens import IGNORED
from workbench.models.load import load_tokenizer
from workbench.models.source import locate
from workbench.texts import corpus
from workbench.training.preview import show

CHATS = [
    [
        {"role": "user", "content": f"What is {n} & one?"},
        {"role": "assistant", "content": f"It is {n + 1}." * (1 + n % 9)},
    ]
    for n in range(40)
]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    return str(path)


def test_an_example_is_what_a_run_sees_and_what_counts_is_marked(chats):
    preview = show(chats, "gpt2-tiny", sequence_length=32)
    assert (preview.documents, preview.measured, len(preview.examples)) == (40, 40, 3)
    first = preview.examples[0]
    assert first.pieces == (("user: What is 0 & one?\nassistant:", False), (" It is 1.<|endoftext|>\n", True))
    assert first.tokens > first.counted > 0 == first.hidden
    assert "assistant:⟦ It is 1.<|endoftext|>" in str(preview)
    page = preview._repr_html_()
    assert "What is 0 &amp; one?" in page
    assert "<mark> It is 1.&lt;|endoftext|&gt;" in page


def test_the_numbers_are_those_of_the_blocks_of_a_run(chats):
    preview = show(chats, "gpt2-tiny", sequence_length=32)
    text, tokenizer = corpus.load_corpus(chats), load_tokenizer(locate("gpt2-tiny"))
    lines = [*text.train, *text.held_out.split(corpus.LINE_END)]
    rows = [corpus.label_line(text, line, tokenizer) for line in lines]
    lengths = sorted(map(len, rows))
    assert preview.tokens == sum(lengths)
    assert preview.counted == sum(label != IGNORED for row in rows for _, label in row)
    assert (preview.lengths["least"], preview.lengths["most"]) == (lengths[0], lengths[-1])
    assert lengths[19] <= preview.lengths["half"] <= lengths[20]
    assert preview.longer == sum(length > 32 for length in lengths) > 0
    assert (preview.blocks, preview.dropped_tokens) == divmod(sum(lengths), 32)
    assert preview.blocks - preview.idle_blocks == len(list(corpus.pack_conversations(rows, 32)))


def test_of_a_text_the_first_blocks_are_shown(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("some words and more of them\n" * 60)
    preview = show(str(path), "gpt2-tiny", sequence_length=16, examples=2)
    text = corpus.load_corpus(str(path))
    blocks = corpus.make_blocks(text, load_tokenizer(locate("gpt2-tiny")), 16, 1)
    shown = ["".join(piece for piece, _ in example.pieces) for example in preview.examples]
    assert shown == [load_tokenizer(locate("gpt2-tiny")).decode(row) for row in blocks.train["input_ids"][:2]]
    assert all(example.tokens == example.counted == 16 for example in preview.examples)
    assert preview.conversations is False


def test_messages_that_a_template_rewrites_are_counted(chats, monkeypatch):
    tokenizer = load_tokenizer(locate("gpt2-tiny"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | replace('It is', '') }}\n{% endfor %}"
    )
    monkeypatch.setattr("workbench.training.preview.load_tokenizer", lambda _: tokenizer)
    assert "40 messages are not written as they stand" in show(chats, "gpt2-tiny").remarks[-1]


def test_the_command_prints_it(chats, capsys, tmp_path):
    assert main(["text", chats, "--model", "gpt2-tiny", "--examples", "1", "--sequence-length", "32"]) == 0
    assert "40 conversations, by the tokenizer of gpt2-tiny" in capsys.readouterr().out
    assert main(["text", chats, "--model", "gpt2-tiny", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["examples"][0]["pieces"][1] == [" It is 1.<|endoftext|>\n", True]
    assert main(["text", str(tmp_path / "none.jsonl"), "--model", "gpt2-tiny"]) == ConfigurationError.exit_code
