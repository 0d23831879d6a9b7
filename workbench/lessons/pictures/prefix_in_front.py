"""Lesson 07: the keys and values that each layer reads, with a learned prefix in front."""

from typing import Any

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
LEFT = 92  # where the keys begin
SHOWN = 4  # layers that are drawn; a large model has more
BAR = (WIDTH - LEFT - 26) / 2
ROW = 34
LEARNED_COLOUR = COLOURS[Category.OPTIMIZER_STATES]
TEXT_COLOUR = COLOURS[Category.ACTIVATIONS]


def prefix_in_front(config: Any, virtual_tokens: int, length: int) -> Drawing:
    """Two bars a layer, its keys and its values: a learned part in front of those of the text, to scale."""
    layers = min(config.n_layer, SHOWN)
    front = BAR * virtual_tokens / (virtual_tokens + length)
    learned = 2 * virtual_tokens * config.n_layer * config.n_embd
    foot = 40 + layers * ROW
    picture = Drawing(
        WIDTH,
        foot + 74,
        f"Each of {config.n_layer} layers has {virtual_tokens} learned keys in front of the {length} of the text, and "
        f"as many values. Below the layers stands the text, {length} tokens, without anything in front.",
    )
    for number, name in enumerate(("keys", "values")):
        x = LEFT + number * (BAR + 24)
        picture.words(x, 16, f"{name}: {virtual_tokens} learned, {length} of the text", bold=True)
        for layer in range(layers):
            y = 28 + layer * ROW
            picture.area(x, y, front, 24, LEARNED_COLOUR)
            picture.area(x + front, y, BAR - front, 24, TEXT_COLOUR)
        middle = x + (front + BAR) / 2
        picture.line(middle, foot + 20, middle, foot - 4, arrow=True)
        picture.area(x + front, foot + 24, BAR - front, 22, label=f"{length} tokens")
    for layer in range(layers):
        picture.words(0, 45 + layer * ROW, f"layer {config.n_layer - layer}")
    if config.n_layer > layers:
        picture.words(0, foot + 8, "… and so on")
    picture.words(0, foot + 40, "the text")
    picture.words(
        LEFT,
        foot + 68,
        f"trained: {virtual_tokens} × 2 × {config.n_embd:,} numbers in each of {config.n_layer} layers, {learned:,}",
    )
    return picture
