"""Lesson 00: what a parameter and a token cost, and the step that they add up to, for fewer and for more tokens."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
TOKEN_X = 340  # where the bar of a token begins; left of it are the 16 bytes of a parameter
FLOOR_Y = 274
HILL = 176  # height of the highest hill
GAP = 24  # between two hills
WEIGHTS, GRADIENTS, STATES, ACTIVATIONS, LOGITS = list(Category)[:5]
Stack = dict[Category, int]


def hill_of_a_step(config: Any, sequences: int, length: int) -> Drawing:
    """A parameter and a token in bytes; below them the step of one sequence, of `sequences`, and of twice as many."""
    batches = sorted({1, sequences, 2 * sequences})
    steps = [stacks_of_a_step(config, batch * length) for batch in batches]
    peaks = [max(sum(stack.values()) for stack in step) for step in steps]
    listed = ", ".join(f"{batch} × {length}: {format_bytes(peak)}" for batch, peak in zip(batches, peaks, strict=True))
    picture = Drawing(
        WIDTH,
        318,
        "A parameter has 16 bytes: 4 of weight, 4 of gradient, 8 of AdamW's averages. A token has activations and "
        f"logits. The steps stand on the same floor, and the hill on it grows with the tokens; peaks: {listed}.",
    )
    _draw_parameter(picture)
    _draw_token(picture, config)
    width = (WIDTH - GAP * (len(steps) - 1)) / len(steps)
    for number, step in enumerate(steps):
        x = number * (width + GAP)
        _draw_hill(picture, x, width, step, HILL / max(peaks))
        picture.words(x, FLOOR_Y + 20, f"{batches[number]} × {length} tokens: {format_bytes(peaks[number])}", bold=True)
        picture.words(x, FLOOR_Y + 38, "forward → backward → AdamW", size=12)
    return picture


def stacks_of_a_step(config: Any, tokens: int) -> list[Stack]:
    """What is alive after each block of the forward pass, at the loss, after each block back, and while AdamW steps."""
    layers = config.n_layer
    width = config.n_embd
    vocabulary = config.vocab_size
    block = 12 * width**2 + 13 * width
    embedding = (vocabulary + config.n_positions) * width
    parameters = embedding + layers * block + 2 * width
    unit = tokens * width

    def stack(blocks: int, logits: int, gradients: int) -> Stack:
        return {
            WEIGHTS: 4 * parameters,
            STATES: 8 * parameters,
            GRADIENTS: 4 * gradients,
            ACTIVATIONS: 4 * (28 * blocks + 2) * unit,
            LOGITS: 4 * logits * tokens * vocabulary,
        }

    forward = [stack(blocks, 0, 0) for blocks in range(1, layers + 1)]
    loss = [stack(layers, 3, 0)]
    # the gradient of the head, then that of one block after the other
    back = [stack(layers - done, 0, vocabulary * width + done * block) for done in range(1, layers)]
    last = stack(0, 0, parameters + 2 * vocabulary * width) | {ACTIVATIONS: 0}  # the embedding's, and its two parts
    adam = stack(0, 0, parameters) | {ACTIVATIONS: 0}
    return [*forward, *loss, *back, last, adam, adam]


def _draw_parameter(picture: Drawing) -> None:
    picture.words(0, 16, "a parameter: 16 bytes", bold=True)
    x = 0.0
    for category, size, label in ((WEIGHTS, 4, "weight"), (GRADIENTS, 4, "gradient"), (STATES, 8, "AdamW's averages")):
        for byte in range(size):
            picture.area(x + 19 * byte, 26, 16, 24, COLOURS[category])
        picture.words(x + 19 * size / 2, 68, f"{label}: {size}", anchor="middle", size=12)
        x += 19 * size


def _draw_token(picture: Drawing, config: Any) -> None:
    activations = 4 * (28 * config.n_layer + 2) * config.n_embd
    logits = 4 * 3 * config.vocab_size
    share = activations / (activations + logits)
    picture.words(TOKEN_X, 16, f"a token: {format_bytes(activations + logits)}", bold=True)
    picture.area(TOKEN_X, 26, (WIDTH - TOKEN_X) * share, 24, COLOURS[ACTIVATIONS])
    picture.area(TOKEN_X + (WIDTH - TOKEN_X) * share, 26, (WIDTH - TOKEN_X) * (1 - share), 24, COLOURS[LOGITS])
    picture.words(TOKEN_X, 68, f"activations: {format_bytes(activations)}", size=12)
    picture.words(WIDTH, 68, f"logits: {format_bytes(logits)}", anchor="end", size=12)


def _draw_hill(picture: Drawing, x: float, width: float, step: list[Stack], pixels_per_byte: float) -> None:
    """One column of stacked areas for each instant of the step."""
    column = width / len(step)
    for instant, stack in enumerate(step):
        y = float(FLOOR_Y)
        for category, size in stack.items():
            height = size * pixels_per_byte
            y -= height
            if height:
                picture.area(x + instant * column, y, column, height, COLOURS[category])
