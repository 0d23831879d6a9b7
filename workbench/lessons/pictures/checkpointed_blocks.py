"""Lesson 03: what a GPT-2 block keeps for its backward pass, and what is left of it under checkpointing."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

# tensors of shape (B, T, C) in one block: each part's inputs and outputs that its gradient needs
PARTS = (("norm", 2), ("attention", 4), ("norm", 2), ("MLP: 5 results, each four times as wide", 20))
KEPT = sum(tensors for _, tensors in PARTS)
WIDTH = 660
KEPT_COLOUR = COLOURS[Category.ACTIVATIONS]


def checkpointed_blocks(config: Any) -> Drawing:
    """One block as 28 tiles, and below it all blocks of the model, without checkpointing and with it."""
    layers = config.num_hidden_layers
    picture = Drawing(
        WIDTH,
        230,
        f"One block keeps {KEPT} tensors, 20 of them in its MLP. Without checkpointing {layers} blocks keep "
        f"{KEPT * layers}; with it {layers}, one each, and {KEPT - 1} more of the block that is being recomputed.",
    )
    _draw_block(picture)
    picture.words(
        0, 112, f"{layers} blocks, at the end of the forward pass: {KEPT} × {layers} = {KEPT * layers}", bold=True
    )
    _draw_model(picture, 122, [KEPT] * layers)
    most = layers + KEPT - 1
    picture.words(
        0, 178, f"checkpointed, while the last block is recomputed: {layers} + {KEPT - 1} = {most}", bold=True
    )
    _draw_model(picture, 188, [1] * (layers - 1) + [KEPT])
    return picture


def _draw_block(picture: Drawing) -> None:
    tile = WIDTH / KEPT
    picture.words(0, 16, f"one block keeps {KEPT} tensors of B × T × C", bold=True)
    x = 0.0
    for part, tensors in PARTS:
        for number in range(tensors):
            picture.area(x + number * tile, 26, tile - 3, 24, KEPT_COLOUR)
        picture.words(x + tensors * tile / 2, 68, part, anchor="middle", size=12)
        x += tensors * tile


def _draw_model(picture: Drawing, y: float, kept: list[int]) -> None:
    """Every block in its own frame, filled as far as it keeps tensors."""
    width = WIDTH / len(kept)
    for block, tensors in enumerate(kept):
        picture.area(block * width, y, width - 5, 26)
        picture.area(block * width, y, (width - 5) * tensors / KEPT, 26, KEPT_COLOUR)
