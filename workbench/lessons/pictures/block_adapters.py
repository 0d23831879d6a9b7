"""Lesson 08: one block under five adapters, and what each of them trains in it."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

MATRICES = {"c_attn": 3, "c_proj": 1, "c_fc": 4, "c_proj (MLP)": 4}  # each has so many times C × C numbers
WIDTH = 660
UNIT = 36.0  # C numbers
ROW = 60
FIRST = 160  # where the matrices begin
STARTS = [FIRST + before * UNIT + number * 14 for number, before in enumerate((0, 3, 4, 8))]
STRIP = 5
TRAINED = COLOURS[Category.OPTIMIZER_STATES]
ADAPTERS = ("LoRA", "DoRA", "(IA)³", "prompt tuning", "QLoRA")


def block_adapters(config: Any, rank: int, virtual_tokens: int) -> Drawing:
    """The four matrices of a block in grey, five times, and in colour what is trained beside them."""
    width = config.n_embd
    layers = config.n_layer
    low_rank = 4 * rank * width * layers
    trained = (low_rank, low_rank + 3 * width * layers, 7 * width * layers, virtual_tokens * width, low_rank)
    picture = Drawing(
        WIDTH,
        36 + ROW * len(ADAPTERS),
        "The four matrices of a block, once for each adapter. LoRA, DoRA and QLoRA train two strips beside the first, "
        "DoRA one number more for each of its columns; (IA)³ a row of factors at the first and at the last; prompt "
        "tuning nothing in the block, only tokens in front of it. Of the matrices of QLoRA an eighth is filled.",
    )
    picture.words(0, 16, "trained, all blocks", size=12)
    for x, (name, times) in zip(STARTS, MATRICES.items(), strict=True):
        picture.words(x + times * UNIT / 2, 16, name, anchor="middle", size=12)
    for number, (name, count) in enumerate(zip(ADAPTERS, trained, strict=True)):
        y = 36 + number * ROW
        picture.words(0, y + 14, name, bold=True)
        picture.words(0, y + 31, f"{count:,}", size=12)
        for x, times in zip(STARTS, MATRICES.values(), strict=True):
            picture.area(x, y, times * UNIT, UNIT, "none")
            height = UNIT / 8 if name == "QLoRA" else UNIT
            picture.area(x, y + UNIT - height, times * UNIT, height)
        _draw_trained(picture, name, y)
    return picture


def _draw_trained(picture: Drawing, name: str, y: float) -> None:
    first = STARTS[0]
    last = STARTS[-1]
    if name in ("LoRA", "DoRA", "QLoRA"):
        picture.area(first - STRIP - 3, y, STRIP, UNIT, TRAINED)
        picture.area(first, y - STRIP - 3, 3 * UNIT, STRIP, TRAINED)
    if name in ("DoRA", "(IA)³"):
        picture.area(first, y + UNIT + 3, 3 * UNIT, STRIP / 2, TRAINED)
    if name == "(IA)³":
        picture.area(last, y - STRIP / 2 - 3, 4 * UNIT, STRIP / 2, TRAINED)
    if name == "prompt tuning":
        picture.area(first - 24, y, 2 * STRIP, UNIT, TRAINED)
