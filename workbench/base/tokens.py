"""Text to tokens, piece by piece, and tokens to blocks. An exported script has those of the functions that it needs."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

# GPT-2's token stands between documents; a tokenizer with another such token replaces it.
END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the label of tokens that the loss leaves out
PIECE_CHARACTERS = 1 << 16  # a piece has at least so many characters, unless the text ends
LONGEST_PIECE = 1 << 18  # a piece has at most so many characters


def encode_text(text: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of a text, piece by piece; the tokenizer's own end of text stands between documents."""
    for piece in _pieces(text):
        if tokenizer.eos_token not in (END_OF_TEXT, None):
            piece = piece.replace(END_OF_TEXT, str(tokenizer.eos_token))
        yield tokenizer(piece, verbose=False)["input_ids"]


BOUNDARY = r"(?:(?<=\S)(?=[ \n])|(?=<\|endoftext\|>))"


def _pieces(text: Iterable[str]) -> Iterator[str]:
    """Cut a long text into pieces that have the same tokens as the whole.

    A piece ends before the white space after a visible character, or before END_OF_TEXT. There GPT-2's pre-tokenizer
    cuts in any case: its pattern (Radford et al. 2019, `encoder.py`) matches white space only at the beginning of a
    word or in a run of its own, and looks ahead only past white space.

    If LONGEST_PIECE characters have no such place, the text is cut all the same, to bound memory: only there may the
    tokens differ from those of the whole.
    """
    usual = rf".{{1,{PIECE_CHARACTERS}}}\Z|.{{{PIECE_CHARACTERS},{LONGEST_PIECE}}}?(?:{BOUNDARY}|\Z)"
    at_most = f".{{1,{LONGEST_PIECE}}}"
    best_end = re.compile(f"{usual}|{at_most}{BOUNDARY}|{at_most}", re.DOTALL)
    enough = LONGEST_PIECE + len(END_OF_TEXT)  # characters that show where a piece is best cut
    rest = ""
    for part in chain(text, [None]):
        rest += part or ""
        start = 0
        while len(rest) - start > (0 if part is None else enough):
            piece = best_end.match(rest, start)
            if piece is None:
                break
            yield piece[0]
            start = piece.end()
        rest = rest[start:]


def pack_blocks(tokens: Iterable[list[Any]], length: int) -> Iterator[list[Any]]:
    """Yield blocks of `length` tokens from lists of any length; the last, shorter piece is dropped."""
    rest: list[Any] = []
    for more in tokens:
        rest += more
        yield from cut_into_blocks(rest, length)
        rest = rest[len(rest) // length * length :]


def cut_into_blocks(tokens: "Any", length: int) -> "list[Any]":
    """Return blocks of `length` tokens; the last, shorter piece is dropped."""
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def pack_conversations(conversations: Iterable[list[tuple[int, int]]], length: int) -> Iterator[dict[str, Any]]:
    """Yield blocks of conversations as rows, without blocks in which no label is predicted."""
    for block in pack_blocks(conversations, length):
        ids, labels = zip(*block, strict=True)
        if set(labels[1:]) != {IGNORED}:
            yield {"input_ids": ids, "labels": labels}
