"""Lesson 05: a matrix of a block and all that training keeps of it, and what LoRA leaves of that, drawn to scale."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

KEPT = (  # what stands in memory for each number that is trained
    ("W", Category.WEIGHTS),
    ("gradient", Category.GRADIENTS),
    ("Adam's mean", Category.OPTIMIZER_STATES),
    ("Adam's mean square", Category.OPTIMIZER_STATES),
)
WIDTH = 660
COLUMN = WIDTH / len(KEPT)
LONG = 144.0  # a matrix is LONG × SHORT units, as the attention's is 3 C × C numbers
SHORT = LONG / 3
GAP = 3  # between a matrix and the thin ones beside it


def low_rank_update(config: Any, rank: int) -> Drawing:
    """The matrix of the attention's input under full fine-tuning, and below it under LoRA."""
    width = config.n_embd
    whole = 3 * width * width
    thin = rank * (width + 3 * width)
    picture = Drawing(
        WIDTH,
        216,
        f"Full fine-tuning keeps four matrices of {width:,} × {3 * width:,} numbers: W, its gradient and two states of "
        f"Adam. LoRA keeps W, frozen; the other three are empty but for two strips that are {rank} numbers thin.",
    )
    picture.words(0, 16, f"full fine-tuning: {width:,} × {3 * width:,} = {whole:,} numbers, four times", bold=True)
    picture.words(0, 118, f"LoRA: W once, and A and B four times, {thin:,} numbers, drawn to scale", bold=True)
    thick = max(1.0, rank / width * SHORT)
    for number, (name, category) in enumerate(KEPT):
        x = number * COLUMN + 12
        colour = COLOURS[category]
        picture.area(x, 26, LONG, SHORT, colour)
        picture.words(x + LONG / 2, 91, name, anchor="middle", size=12)
        picture.area(x, 138, LONG, SHORT, colour if number == 0 else PALE)
        picture.area(x - GAP - thick, 138, thick, SHORT, colour)
        picture.area(x, 138 - GAP - thick, LONG, thick, colour)
        below = "W, frozen; A left, B above" if number == 0 else "of A and B"
        picture.words(x + LONG / 2, 203, below, anchor="middle", size=12)
    return picture
