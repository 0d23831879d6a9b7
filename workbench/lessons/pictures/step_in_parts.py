"""Lesson 02: what lives during a step, with one batch and with the batch in micro-batches."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
COLUMNS = 24  # of a forward pass that is not cut; of a backward pass as many
HEIGHT = 104  # of the highest column
LABELLED = 4  # parts; with more there is no room for words
DRAWN = (Category.GRADIENTS, Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)  # from the floor upwards


def step_in_parts(config: Any, sequences: int, length: int, parts: int) -> Drawing:
    """Activations, logits and gradients over the time of one step, whole above and in `parts` below, on one scale."""
    sizes = _bytes_of_step(config, sequences * length)
    batch = sizes[Category.ACTIVATIONS] + sizes[Category.LOGITS_AND_LOSS]
    peaks = [max(batch, sizes[Category.GRADIENTS]), batch // parts + sizes[Category.GRADIENTS]]
    scale = HEIGHT / max(peaks)
    heights = [sizes[category] * scale for category in DRAWN]
    floors = [26 + peaks[0] * scale, 86 + sum(peaks) * scale]
    picture = Drawing(
        WIDTH,
        round(floors[1]) + 50,
        f"With one batch of {sequences} sequences, activations and logits rise to {format_bytes(batch)} and fall while "
        f"the gradients come. In {parts} parts they rise {parts} times, to a part of that, and from the second part on "
        f"all gradients lie under them: {format_bytes(peaks[1])} at most.",
    )
    picture.words(0, 16, f"1 × {sequences} sequences: {format_bytes(peaks[0])} at most", bold=True)
    _draw_step(picture, floors[0], 1, heights)
    title = f"{parts} × {sequences / parts:g} sequences: {format_bytes(peaks[1])} at most; gradients wait for the end"
    picture.words(0, floors[0] + 50, title, bold=True)
    _draw_step(picture, floors[1], parts, heights)
    _draw_legend(picture, floors[1] + 34)
    return picture


def _bytes_of_step(config: Any, tokens: int) -> dict[Category, int]:
    blocks = config.n_layer
    width = config.n_embd
    vocabulary = config.vocab_size
    embeddings = (vocabulary + config.n_positions) * width
    return {
        Category.GRADIENTS: 4 * (embeddings + blocks * (12 * width**2 + 13 * width) + 2 * width),
        Category.ACTIVATIONS: 4 * (28 * blocks + 2) * tokens * width,
        Category.LOGITS_AND_LOSS: 4 * 3 * tokens * vocabulary,
    }


def _draw_step(picture: Drawing, floor: float, parts: int, heights: list[float]) -> None:
    """Activations of each part rise in its forward pass and fall in its backward pass; logits are there between."""
    gradients, activations, logits = heights
    columns = max(2, COLUMNS // parts)
    column = WIDTH / (2 * columns * parts)
    for number in range(2 * columns * parts):
        part, instant = divmod(number, 2 * columns)
        turned = max(0, instant - columns) / (columns - 1)  # how much of the backward pass is done
        kept = (instant + 1) / columns if instant < columns else 1 - turned
        at_loss = instant in (columns - 1, columns)
        stack = (gradients if part else gradients * turned, activations / parts * kept, logits / parts * at_loss)
        y = floor
        for category, height in zip(DRAWN, stack, strict=True):
            y -= height
            if height:
                picture.area(number * column, y, column, height, COLOURS[category])
    for part in range(parts if parts <= LABELLED else 0):
        middle = (2 * part + 1) * columns * column
        picture.words(middle, floor + 16, "forward, backward", anchor="middle", size=12)


def _draw_legend(picture: Drawing, y: float) -> None:
    x = 0.0
    for category, width in zip(DRAWN, (92, 100, 70), strict=True):
        picture.area(x, y, 12, 12, COLOURS[category])
        picture.words(x + 18, y + 11, category.replace("_and_loss", ""), size=12)
        x += width
    picture.words(x, y + 11, "(left out: weights and optimizer states, always there)", size=12)
