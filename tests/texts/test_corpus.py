"""Text to blocks. Other kinds of files: test_readers.py. What is refused: tests/faults/test_text.py."""

import inspect
import re
from pathlib import Path

import pytest

from workbench.base.errors import ConfigurationError
from workbench.texts import corpus


@pytest.fixture(scope="module")
def tokenizer():
    from workbench.models.gpt2 import gpt2_tokenizer

    return gpt2_tokenizer()


def written(folder: Path, data: bytes, name: str = "text.txt") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_the_embedded_text_has_two_parts_that_differ():
    text = corpus.load_corpus("shakespeare")
    assert "shakespeare" in corpus.list_embedded()
    assert len(text.train) > 5 * len(text.held_out) > 0
    assert text.held_out[:200] not in text.train


def test_of_a_file_the_last_tenth_is_held_out(tmp_path):
    text = corpus.load_corpus(str(written(tmp_path, b"0123456789" * 10)))
    assert text.train == "0123456789" * 9
    assert text.held_out == "0123456789"


def test_plain_text_is_read_whatever_it_is_called(tmp_path, subtests):
    for name in ("a.txt", "a.md", "A.TXT", "README"):
        with subtests.test(name):
            assert corpus.load_corpus(str(written(tmp_path, b"some text here", name))).train.startswith("some")


def test_a_byte_order_mark_is_dropped(tmp_path):
    text = corpus.load_corpus(str(written(tmp_path, b"\xef\xbb\xbfOnce upon a time")))
    assert text.train.startswith("Once")


def test_windows_line_ends_become_plain_ones(tmp_path):
    dos = corpus.load_corpus(str(written(tmp_path, b"one\r\ntwo\r\n" * 20, "dos.txt")))
    unix = corpus.load_corpus(str(written(tmp_path, b"one\ntwo\n" * 20, "unix.txt")))
    assert dos.train == unix.train
    assert dos.sha256 == unix.sha256


def test_the_hash_is_that_of_the_text_not_of_the_path(tmp_path):
    one = corpus.load_corpus(str(written(tmp_path, b"the same text", "one.txt")))
    same = corpus.load_corpus(str(written(tmp_path, b"the same text", "same.txt")))
    other = corpus.load_corpus(str(written(tmp_path, b"the same texT", "other.txt")))
    assert re.fullmatch("[0-9a-f]{64}", one.sha256)
    assert one.sha256 == same.sha256 != other.sha256


def test_blocks_are_contiguous_and_of_equal_length(tokenizer):
    text = corpus.Corpus("counting", " ".join(map(str, range(400))), " ".join(map(str, range(200))), "")
    blocks = corpus.make_blocks(text, tokenizer, sequence_length=16, batch=1)
    for part, dataset in ((text.train, blocks.train), (text.held_out, blocks.held_out)):
        rows = dataset["input_ids"]
        tokens = tokenizer(part)["input_ids"]
        assert {len(row) for row in rows} == {16}
        assert len(rows) == len(tokens) // 16
        assert [token for row in rows for token in row] == tokens[: 16 * len(rows)]


def test_the_plain_function_cuts_as_a_run_does():
    scope = {}
    exec(inspect.getsource(corpus.cut_into_blocks), scope)  # in an exported script there is nothing else
    assert scope["cut_into_blocks"](list(range(10)), 3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert scope["cut_into_blocks"]([1, 2], 3) == []


def test_the_tokens_of_the_last_text_are_kept_for_all_lengths(tokenizer, monkeypatch):
    encode_text, texts = corpus.encode_text, []
    monkeypatch.setattr(corpus, "encode_text", lambda text, by: texts.extend(text) or encode_text(text, by))
    first, second = "one two " * 99, "three four " * 99
    for text, length in ((first, 16), (first, 8), (second, 8), (first, 8)):
        blocks = corpus.make_blocks(corpus.Corpus("any", text, "word " * 99, ""), tokenizer, length, batch=1)
        assert tokenizer.decode(blocks.train[0]["input_ids"]) == " ".join(text.split()[:length])
    assert [text for text in texts if not text.startswith("word")] == [first, second, first]


def test_the_held_out_part_is_capped(tokenizer):
    text = corpus.Corpus("long", "word " * 100, "word " * 3 * corpus.HELD_OUT_TOKENS, "")
    blocks = corpus.make_blocks(text, tokenizer, sequence_length=64, batch=1)
    assert len(blocks.held_out) * 64 == corpus.HELD_OUT_TOKENS


def test_a_text_too_short_for_a_batch_is_refused_with_the_numbers(tokenizer):
    text = corpus.Corpus("short", "word " * 100, "word " * 100, "")  # 100 tokens are 6 blocks of 16
    with pytest.raises(ConfigurationError, match="short gives 6 training blocks of 16 tokens, but a batch needs 7"):
        corpus.make_blocks(text, tokenizer, sequence_length=16, batch=7)
    assert len(corpus.make_blocks(text, tokenizer, sequence_length=16, batch=6).train) == 6


def test_a_held_out_part_shorter_than_a_block_is_refused(tokenizer):
    text = corpus.Corpus("short", "word " * 100, "word " * 10, "")
    with pytest.raises(ConfigurationError, match="held-out part of short is shorter than one block of 16 tokens"):
        corpus.make_blocks(text, tokenizer, sequence_length=16, batch=1)


def test_one_word_is_too_short(tmp_path, tokenizer):
    text = corpus.load_corpus(str(written(tmp_path, b"word")))
    with pytest.raises(ConfigurationError, match="Use a longer text"):
        corpus.make_blocks(text, tokenizer, sequence_length=16, batch=1)


def test_a_prompt_can_be_taken_from_any_held_out_text(subtests):
    for held_out in ("word " * 400, "one\n\ntwo words\n\n" * 30, "a" * 50 + "\n\n", "word", "x\n\n\n\n"):
        with subtests.test(held_out=held_out[:20]):
            prompt = corpus.prompt(corpus.Corpus("any", "", held_out, ""))
            assert prompt.strip()
            assert prompt in held_out
            assert len(prompt) <= corpus.PROMPT_CHARACTERS
