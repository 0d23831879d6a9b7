"""Lesson 18b: the cache of a generation, a column for each token and a row for each layer's keys and values."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
HEIGHT = 112  # of all layers
TOP = 28
PROMPT = COLOURS[Category.WEIGHTS]
NEW = COLOURS[Category.GRADIENTS]


def key_value_cache(config: Any, prompt: int, new: int) -> Drawing:
    """The prompt's columns come at once, then one with each token; the last token's would never be needed."""
    layers = config.n_layer
    tokens = prompt + new - 1
    column = 4 * 2 * layers * config.n_embd
    picture = Drawing(
        WIDTH,
        TOP + HEIGHT + 52,
        f"A grid of {tokens} columns, one for each token, and {layers} rows, one for each layer. The {prompt} columns "
        f"of the prompt are filled at once, then one with each new token. A column has {format_bytes(column)}.",
    )
    picture.words(
        0, 16, f"{tokens} tokens × {layers} layers × keys and values: {format_bytes(tokens * column)}", bold=True
    )
    wide = WIDTH / tokens
    high = HEIGHT / layers
    for token in range(tokens):
        for layer in range(layers):
            colour = PROMPT if token < prompt else NEW
            picture.area(token * wide, TOP + layer * high, wide - 1, high - 1, colour)
    picture.words(0, TOP + HEIGHT + 18, f"the prompt: {prompt} tokens, one forward pass", size=12)
    picture.words(WIDTH, TOP + HEIGHT + 18, f"{new - 1} new tokens, a forward pass each", anchor="end", size=12)
    picture.words(
        0, TOP + HEIGHT + 44, f"one column: {format_bytes(column)}, times the batch, times num_beams", bold=True
    )
    return picture
