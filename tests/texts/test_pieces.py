"""Any text at all is cut into pieces of a bounded length that say the same as the whole."""

import time
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.base import tokens as text_tokens
from workbench.base.tokens import END_OF_TEXT
from workbench.models.gpt2 import gpt2_tokenizer
from workbench.models.load import load_tokenizer
from workbench.models.source import locate
from workbench.techniques.padding import make_examples
from workbench.techniques.streaming import stream_blocks

SIZE, MOST = 20, 60
ALPHABETS = (
    "ab \n",
    "\r\n\t \u00a0\u3000",
    "a",
    "的是，。！ab ",
    "🙂👍\U0001f3fd\u200d\ufe0f",
    "e\u0301\u0300'_19 ",
    "日本語",
)
CHOICES = [st.text(letters, max_size=150) for letters in ALPHABETS]
PARTS = st.one_of(*CHOICES, st.just(END_OF_TEXT), st.text(max_size=30))
TEXTS = st.lists(PARTS, max_size=6)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(text_tokens, "PIECE_CHARACTERS", SIZE)
    monkeypatch.setattr(text_tokens, "LONGEST_PIECE", MOST)


def tokens(pieces):
    return [token for piece in pieces for token in gpt2_tokenizer()(piece, verbose=False)["input_ids"]]


@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_pieces_are_short_say_the_same_and_do_not_depend_on_how_the_text_arrives(parts):
    whole = "".join(parts)
    pieces = list(text_tokens._pieces(parts))
    assert "".join(pieces) == whole
    assert all(0 < len(piece) <= MOST + len(END_OF_TEXT) for piece in pieces)
    assert pieces == list(text_tokens._pieces([whole])) == list(text_tokens._pieces(whole))
    assert gpt2_tokenizer().decode(tokens(pieces)) == whole


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.text("ab的是。'1_.\u0301", min_size=1, max_size=MOST - 2), max_size=12),
    st.sampled_from([" ", "\n", END_OF_TEXT]),
)
def test_where_there_is_a_boundary_the_tokens_are_those_of_the_whole(words, boundary):
    whole = boundary.join(words)
    assert tokens(text_tokens._pieces([whole])) == tokens([whole])


CUTS = (
    ("a" * 40 + END_OF_TEXT + "b" * 40, "a" * 40),  # between documents
    ("a" * 8 + " " + "b" * 80, "a" * 8),  # before a space, be it early
    ("\u0301" * 100, "\u0301" * 60),  # but somewhere
)


def test_the_cut_is_made_where_it_does_least_harm(subtests):
    for text, begin in CUTS:
        with subtests.test(text=ascii(text[:10])):
            assert next(iter(text_tokens._pieces([text]))) == begin


def other_end():
    """GPT-2's tokenizer, whose texts end with another token."""
    tokenizer = load_tokenizer(locate("gpt2-tiny"))
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


def test_documents_end_with_the_tokenizers_own_end_wherever_they_are_cut():
    tokenizer = other_end()
    documents = ["的" * 30 + f"{number}" for number in range(30)]
    ids = list(chain.from_iterable(text_tokens.encode_text([END_OF_TEXT.join(documents)], tokenizer)))
    assert ids == tokenizer("</s>".join(documents))["input_ids"]
    assert ids.count(tokenizer.eos_token_id) == 29
    (streamed,) = stream_blocks(END_OF_TEXT.join(documents), tokenizer, len(ids), 1)
    assert streamed["input_ids"] == ids


def test_streamed_blocks_and_padded_examples_are_cut_too(subtests):
    lengths = []

    class Watched:
        eos_token, eos_token_id = END_OF_TEXT, 50256

        def __call__(self, piece, **_):
            lengths.append(len(piece))
            return gpt2_tokenizer()(piece, verbose=False)

    for letters in ("a", " ", "的", "🙂", ".\n"):
        with subtests.test(letters=letters):
            text = "begin" + letters * 300
            packed = list(chain.from_iterable(text_tokens.encode_text([text], gpt2_tokenizer())))
            (block,) = stream_blocks(text, Watched(), len(packed), 1)
            assert block["input_ids"] == packed
            make_examples(text, Watched(), 16, 1)
            assert max(lengths) <= MOST + len(END_OF_TEXT)


def test_it_takes_time_in_proportion(monkeypatch):
    monkeypatch.undo()
    for text in ("a" * 2_000_000, " " * 2_000_000, "的" * 2_000_000, "\n" * 2_000_000):
        start = time.process_time()
        assert sum(map(len, text_tokens._pieces(text[i : i + 99] for i in range(0, len(text), 99)))) == len(text)
        assert time.process_time() - start < 3
