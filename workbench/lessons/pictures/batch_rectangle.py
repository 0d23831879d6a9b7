"""Lesson 06: a step as a rectangle of sequences and tokens, whose area is what it keeps."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
WIDEST = 236  # pixels of the longest sequence
HIGHEST = 112  # and of the most sequences
GAP = 28
TOP = 50


def batch_rectangle(config: Any, *shapes: tuple[int, int]) -> Drawing:
    """For each (sequences, tokens) a rectangle, all to one scale; the first is the whole."""
    row = HIGHEST / max(sequences for sequences, _ in shapes)
    column = WIDEST / max(length for _, length in shapes)
    whole = shapes[0][0] * shapes[0][1]
    token_bytes = 4 * ((28 * config.n_layer + 2) * config.n_embd + 3 * config.vocab_size)
    listed = ", ".join(f"{sequences} × {length}" for sequences, length in shapes)
    picture = Drawing(
        WIDTH,
        TOP + HIGHEST + 44,
        f"Rectangles of sequences × tokens, to scale: {listed}. What a step keeps grows with the area, whichever side "
        "is cut.",
    )
    title = f"one line a sequence; each token keeps {format_bytes(token_bytes)} of activations and logits"
    picture.words(0, 16, title, bold=True)
    x = 0.0
    for sequences, length in shapes:
        for number in range(sequences):
            picture.area(x, TOP + number * row, length * column, row * 0.85, COLOURS[Category.ACTIVATIONS])
        below = TOP + sequences * row
        picture.words(x, TOP - 8, f"T = {length} tokens", size=12)
        picture.words(x, below + 18, f"B × T = {sequences} × {length}", bold=True)
        picture.words(x, below + 36, f"{sequences * length / whole:.0%} of the area", size=12)
        x += length * column + GAP
    return picture
