"""Lesson 12: what GELU and attention keep for the backward pass, and what besides if they are written out in Python."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
BESIDES = 240  # where the right column begins
LONGEST = 150  # the side of the larger square
TILE = 74
KEPT = COLOURS[Category.ACTIVATIONS]


def written_out_and_fused(config: Any, length: int) -> Drawing:
    """GELU of one block; below it attention of one head, for `length` tokens and for some times more, to one scale."""
    longer = length * max(2, 1024 // length)
    head = config.n_embd // config.n_head
    picture = Drawing(
        WIDTH,
        328,
        f"Left, what is kept either way: of GELU one tensor, of attention four strips of T × {head} a head, which grow "
        f"with T. Right, what is kept besides if they are written out: three more tensors, and a square of T × T "
        f"probabilities a head, small for {length} tokens, large for {longer}.",
    )
    picture.words(0, 16, "kept either way", bold=True)
    picture.words(BESIDES, 16, "kept besides, if written out in Python", bold=True)
    picture.area(0, 28, TILE, 30, KEPT, "x")
    picture.words(0, 76, "GELU: B × T × 4 C", size=12)
    for number, name in enumerate(("x / 2", "tanh", "1 + tanh")):
        picture.area(BESIDES + number * (TILE + 4), 28, TILE, 30, KEPT, name)
    picture.words(BESIDES, 76, "three tensors of B × T × 4 C", size=12)
    scale = LONGEST / longer
    strip = head * scale
    left = 0.0
    right = float(BESIDES)
    for tokens in (length, longer):
        side = tokens * scale
        name = f"T = {tokens:,}"
        for number in range(4):  # queries, keys, values, output
            picture.area(left + number * (strip + 3), 122, strip, side, KEPT)
        picture.area(right, 122, side, side, KEPT)
        picture.words(left, 114, name, size=12)
        picture.words(right, 114, name, size=12)
        left += max(4 * (strip + 3), 60) + 24
        right += max(side, 60) + 24
    below = 122 + LONGEST + 20
    picture.words(0, below, f"attention, a head: four of T × {head}", size=12)
    picture.words(BESIDES, below, "the probabilities, T × T", size=12)
    return picture
