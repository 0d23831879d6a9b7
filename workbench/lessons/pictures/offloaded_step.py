"""Lesson 10: a step in two lanes, the card's and the host's, with what moves between them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
LANE = 90  # the height of the fullest moment
CARD = 134  # where the card's lane stands
HOST = 276
ARROWS = 12  # at most so many a pass
WORDS = {
    Category.WEIGHTS: "weights",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATES: "AdamW's states",
    Category.ACTIVATIONS: "activations",
    Category.LOGITS_AND_LOSS: "logits and their gradient",
}


@dataclass
class Moment:
    """What lies on the card and on the host, in parts of the sizes, for a part of the time; and what moves."""

    phase: str
    time: float
    card: dict[Category, float]
    host: dict[Category, float]
    leaves: bool = False
    comes: bool = False


def offloaded_step(config: Any, sequences: int, length: int) -> Drawing:
    """Both lanes from left to right, to one scale: forward pass, loss, backward pass and optimizer step."""
    blocks = config.n_layer
    width = config.n_embd
    parameters = (config.vocab_size + config.n_positions) * width + blocks * (12 * width**2 + 13 * width) + 2 * width
    sizes = {
        Category.WEIGHTS: 4 * parameters,
        Category.GRADIENTS: 4 * parameters,
        Category.OPTIMIZER_STATES: 8 * parameters,
        Category.ACTIVATIONS: 28 * blocks * 4 * sequences * length * width,
        Category.LOGITS_AND_LOSS: 2 * 4 * sequences * length * config.vocab_size,
    }
    picture = Drawing(
        WIDTH,
        332,
        "Two lanes over the time of one step. In the forward pass the activations of each block leave the card and "
        "pile up on the host; in the backward pass they come back, those of the last block first. AdamW's states lie "
        "on the host all the time, and pass through the card piece by piece in the optimizer step.",
    )
    _draw_moments(picture, list(_moments(blocks)), sizes, every=-(-blocks // ARROWS))
    for number, (category, size_bytes) in enumerate(sizes.items()):
        x = number % 3 * 220
        y = HOST + 14 + number // 3 * 22
        picture.area(x, y, 12, 12, COLOURS[category])
        picture.words(x + 18, y + 11, f"{WORDS[category]}, {format_bytes(size_bytes)}", size=12)
    return picture


def _moments(blocks: int) -> Iterator[Moment]:
    weights = {Category.WEIGHTS: 1.0}
    at_work = {Category.ACTIVATIONS: 1 / blocks}
    states = {Category.OPTIMIZER_STATES: 1.0}
    for done in range(blocks):
        host = states | {Category.ACTIVATIONS: done / blocks}
        yield Moment("forward", 0.27 / blocks, weights | at_work, host, leaves=True)
    logits = {Category.LOGITS_AND_LOSS: 1.0}
    yield Moment("loss", 0.07, weights | logits, states | {Category.ACTIVATIONS: 1.0})
    for done in range(blocks):  # twice the arithmetic of the forward pass
        gradients = {Category.GRADIENTS: (done + 1) / blocks}
        host = states | {Category.ACTIVATIONS: (blocks - 1 - done) / blocks}
        yield Moment("backward", 0.54 / blocks, weights | gradients | at_work, host, comes=True)
    yield Moment("step", 0.12, weights | {Category.GRADIENTS: 1.0}, states, leaves=True, comes=True)


def _draw_moments(picture: Drawing, moments: list[Moment], sizes: dict[Category, int], every: int) -> None:
    picture.words(4, 44, "on the card", bold=True)
    picture.words(4, HOST - LANE + 6, "on the host", bold=True)
    stacks = [stack for moment in moments for stack in (moment.card, moment.host)]
    scale = LANE / max(sum(part * sizes[category] for category, part in stack.items()) for stack in stacks)
    begins: dict[str, float] = {}
    x = 0.0
    for number, moment in enumerate(moments):
        wide = moment.time * WIDTH
        begins.setdefault(moment.phase, x)
        for ground, stack in ((CARD, moment.card), (HOST, moment.host)):
            y = float(ground)
            for category, part in stack.items():
                height = part * sizes[category] * scale
                y -= height
                if height:
                    picture.area(x, y, wide, height, COLOURS[category])
        middle = x + wide / 2
        shift = 5 if moment.leaves and moment.comes else 0
        if (moment.leaves and number % every == 0) or shift:
            picture.line(middle - shift, CARD + 4, middle - shift, CARD + 28, arrow=True)
        if (moment.comes and number % every == 0) or shift:
            picture.line(middle + shift, CARD + 28, middle + shift, CARD + 4, arrow=True)
        x += wide
    for phase, start in begins.items():
        picture.line(start, 4, start, HOST, dashed=True)
        picture.words(start + 4, 16, phase, size=12)
