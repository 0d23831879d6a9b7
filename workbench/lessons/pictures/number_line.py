"""Lesson 04: the numbers that bf16 and fp16 have near a weight, and where updates of some size fall between them."""

import math
from collections.abc import Sequence

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

DIGITS = {"fp32": 23, "fp16": 10, "bf16": 7}  # bits of the mantissa
FEWEST = 6  # gaps of bf16 from the left end to the right
MOST = 12
LEFT = 60
RIGHT = 640
COLOUR = COLOURS[Category.WEIGHTS]


def number_line(weight: float, rates: Sequence[float]) -> Drawing:
    """The numbers near a weight in three types, and an arrow for each rate: about what Adam adds in a step.

    They begin at a power of two, up to whose double all gaps are the same.
    """
    start = math.ldexp(1.0, math.frexp(weight)[1] - 1)
    gaps = {kind: gap(weight, kind) for kind in DIGITS}
    shown = min(max(FEWEST, math.ceil(max(rates) / gaps["bf16"])), MOST)
    outcomes = [f"rate {rate:g}: {_moves(rate, gaps)}" for rate in rates]
    picture = Drawing(
        660,
        160 + 44 * len(rates),
        f"From {start:.2g} to {2 * start:.2g} the numbers of bf16 are {gaps['bf16']:.2g} apart, those of "
        f"fp16 an eighth of that, and those of fp32 too close to draw. {'; '.join(outcomes)}.",
    )
    scale = (RIGHT - LEFT) / (shown * gaps["bf16"])
    title = f"the numbers from {start:.2g} on; up to {2 * start:.2g} the gaps stay the same"
    picture.words(0, 16, title, bold=True)
    for row, (kind, width) in enumerate(gaps.items()):
        y = 30 + 36 * row
        picture.words(0, y + 17, kind)
        if kind == "fp32":  # 65,536 numbers for one gap of bf16
            picture.area(LEFT, y, RIGHT - LEFT, 22, COLOUR)
            continue
        picture.line(LEFT, y + 11, RIGHT, y + 11)
        for number in range(round(shown * gaps["bf16"] / width) + 1):
            picture.area(LEFT - 1.5 + number * width * scale, y, 3, 22, COLOUR)
    half = LEFT + scale * gaps["bf16"] / 2
    bottom = 142 + 44 * len(rates)
    picture.line(half, 102, half, bottom, dashed=True)
    picture.words(half + 8, bottom + 10, "half a gap of bf16: a smaller update is rounded away", size=12)
    for row, (rate, outcome) in enumerate(zip(rates, outcomes, strict=True)):
        y = 168 + 44 * row
        picture.words(half + 8, y - 10, outcome)
        picture.line(LEFT, y, min(LEFT + scale * rate, RIGHT), y, arrow=True)
    return picture


def gap(weight: float, kind: str) -> float:
    """From a number to the next larger one in this type."""
    _, exponent = math.frexp(weight)  # the weight is 2 to the exponent, times one half to one
    return math.ldexp(1.0, exponent - 1 - DIGITS[kind])


def _moves(rate: float, gaps: dict[str, float]) -> str:
    moves = []
    for kind in ("fp16", "bf16"):
        count = round(rate / gaps[kind])
        gaps_moved = f"{count} gap{'s' * (count > 1)}"
        moves.append(f"{kind} moves by {gaps_moved}" if count else f"{kind} stays")
    return ", ".join(moves)
