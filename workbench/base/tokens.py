"""Text to tokens, piece by piece, and tokens to blocks; an exported script has those of the functions that it needs."""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

# between documents: GPT-2's token, which another tokenizer's own replaces
END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # the label of what does not count
PIECE_CHARACTERS = 1 << 16
LONGEST_PIECE = 1 << 18


def encoded(text: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of a text, piece by piece; between documents stands the tokenizer's own end of text."""
    for piece in _pieces(text):
        if tokenizer.eos_token not in (END_OF_TEXT, None):
            piece = piece.replace(END_OF_TEXT, str(tokenizer.eos_token))
        yield tokenizer(piece, verbose=False)["input_ids"]


BOUNDARY = r"(?:(?<=\S)(?=[ \n])|(?=<\|endoftext\|>))"


def _pieces(text: Iterable[str]) -> Iterator[str]:
    """A long text in pieces that have the same tokens as the whole.

    They end before the white space after a visible character, or before END_OF_TEXT. There GPT-2's pre-tokenizer cuts
    in any case: its pattern (Radford et al. 2019, `encoder.py`) matches white space only at the beginning of a word or
    in a run of its own, and looks ahead only past white space.

    Where LONGEST_PIECE characters have no such place, the cut is made all the same, that memory stays bounded: there,
    and nowhere else, the tokens may be others than those of the whole.
    """
    usual = rf".{{1,{PIECE_CHARACTERS}}}\Z|.{{{PIECE_CHARACTERS},{LONGEST_PIECE}}}?(?:{BOUNDARY}|\Z)"
    at_most = f".{{1,{LONGEST_PIECE}}}"
    best_end = re.compile(f"{usual}|{at_most}{BOUNDARY}|{at_most}", re.DOTALL)
    enough = LONGEST_PIECE + len(END_OF_TEXT)  # of the text to see what is the best place
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


def packed(tokens: Iterable[list[Any]], length: int) -> Iterator[list[Any]]:
    """Blocks of `length` of what comes in lists; the last, shorter piece is dropped."""
    rest: list[Any] = []
    for more in tokens:
        rest += more
        yield from cut_into_blocks(rest, length)
        rest = rest[len(rest) // length * length :]


def cut_into_blocks(tokens: "Any", length: int) -> "list[Any]":
    """Blocks of `length` tokens; the last, shorter piece is dropped."""
    return [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]


def labelled_rows(conversations: Iterable[list[tuple[int, int]]], length: int) -> Iterator[dict[str, Any]]:
    """Blocks of conversations as rows, without those in which no label is predicted."""
    for block in packed(conversations, length):
        ids, labels = zip(*block, strict=True)
        if set(labels[1:]) != {IGNORED}:
            yield {"input_ids": ids, "labels": labels}
