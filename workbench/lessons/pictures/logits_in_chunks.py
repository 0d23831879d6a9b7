"""Lesson 13: the logits of a step as a rectangle of tokens × vocabulary, and the piece of it that a chunk needs."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
MARGIN = 50  # left of the logits, for the hidden states
TALLEST = 130  # units that the tokens may take
LOGITS = COLOURS[Category.LOGITS_AND_LOSS]
HIDDEN = COLOURS[Category.ACTIVATIONS]


def logits_in_chunks(config: Any, tokens: int, chunk: int) -> Drawing:
    """Hidden states times the head make the logits: of all tokens at once, and of one chunk of them."""
    chunk = min(chunk, tokens)
    vocabulary = config.vocab_size
    scale = min((WIDTH - MARGIN) / vocabulary, TALLEST / max(tokens, config.hidden_size))
    half = 82 + scale * (config.hidden_size + tokens)
    whole = f"{tokens:,} × {vocabulary:,}"
    piece = f"{chunk:,} × {vocabulary:,}"
    picture = Drawing(
        WIDTH,
        round(2 * half),
        f"Hidden states, {tokens:,} × {config.hidden_size:,}, times the head make {whole} logits, a large rectangle. "
        f"A chunk of them is {piece}, {chunk / tokens:.0%} of it. Everything is drawn to one scale.",
    )
    all_bytes = 4 * tokens * vocabulary
    picture.words(
        0, 16, f"all at once: logits {whole}, {format_bytes(all_bytes)}; three such tensors are alive", bold=True
    )
    _draw_product(picture, 26, scale, config, tokens, tokens)
    chunk_bytes = 4 * chunk * vocabulary
    picture.words(
        0, half + 16, f"in chunks: {piece}, {format_bytes(chunk_bytes)}; two are alive, then the next chunk", bold=True
    )
    _draw_product(picture, half + 26, scale, config, tokens, chunk)
    return picture


def _draw_product(picture: Drawing, y: float, scale: float, config: Any, tokens: int, there: int) -> None:
    """The hidden states on the left, the head above, and as many rows of logits as are there."""
    across = scale * config.vocab_size
    wide = scale * config.hidden_size
    top = y + wide + 6
    picture.area(MARGIN, y, across, wide)
    picture.area(MARGIN - 8 - wide, top, wide, scale * tokens, HIDDEN)
    if there < tokens:
        picture.area(MARGIN, top, across, scale * tokens, PALE)
    picture.area(MARGIN, top, across, scale * there, LOGITS)
    below = top + scale * tokens + 16
    picture.words(0, below, f"hidden states: {config.hidden_size:,} wide", size=12)
    picture.words(
        MARGIN + across, below, f"above: the head; below it: logits, {config.vocab_size:,} wide", anchor="end", size=12
    )
