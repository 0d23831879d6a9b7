"""Lesson 20: what each of several cards keeps of a model that they train together, to scale."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
GAP = 12  # between two cards
BAR = 24
ROW = 66
FP32 = 4  # bytes
PARTS = ((Category.WEIGHTS, 1), (Category.GRADIENTS, 1), (Category.OPTIMIZER_STATES, 2))  # numbers for each parameter
SLOTS = 5  # the four of PARTS, and one for what comes on top
PASSING = "70"  # as opaque is the colour of what is not kept all the time


def shards(config: Any, ranks: int) -> Drawing:
    """Weights, gradients and states on each of so many cards: under DDP, and under two settings of FSDP2."""
    width = config.n_embd
    block = 12 * width**2 + 13 * width
    in_no_block = (config.vocab_size + config.n_positions + 2) * width
    numbers = config.n_layer * block + in_no_block
    whole = format_bytes(FP32 * (SLOTS - 1) * numbers)
    part = format_bytes(FP32 * (SLOTS - 1) * numbers // ranks)
    weights = format_bytes(FP32 * numbers)
    passing = COLOURS[Category.WEIGHTS] + PASSING
    picture = Drawing(
        WIDTH,
        3 * ROW + 24,
        f"Three rows of {ranks} cards. With none each keeps {whole} of weights, gradients and states, and buckets as "
        f"large as the gradients. With gradients and with full each keeps {part}, its own part of them; weights of "
        "the others come for a while, all of them with gradients, and few at a time with full.",
    )
    moment = format_bytes(FP32 * (block + in_no_block))
    # a title; into how many parts all is cut; what comes on top, in its colour, as a share of the weights
    rows = (
        (f"none (DDP): {whole} each, and {weights} of buckets", 1, 1.0, COLOURS[Category.GRADIENTS]),
        (f"gradients: {part} each, and for a while all weights, {weights}", ranks, 1.0, passing),
        (
            f"full: {part} each, and for a moment a block and the embeddings, {moment}",
            ranks,
            (block + in_no_block) / numbers,
            passing,
        ),
    )
    for row, (title, cut, on_top, colour) in enumerate(rows):
        picture.words(0, row * ROW + 16, title, bold=True)
        for card in range(ranks):
            _draw_card(picture, card, ranks, row * ROW + 24, cut, on_top, colour)
    _draw_legend(picture, 3 * ROW + 8)
    return picture


def _draw_card(picture: Drawing, card: int, ranks: int, y: float, cut: int, on_top: float, colour: str) -> None:
    """A frame for all that a model has; filled is what this card keeps of it, and then what comes on top."""
    width = (WIDTH - GAP * (ranks - 1)) / ranks
    slot = width / SLOTS
    x = card * (width + GAP)
    for category, slots in PARTS:
        picture.area(x, y, slots * slot, BAR)
        kept = slots * slot / cut
        picture.area(x + card * kept * (cut > 1), y, kept, BAR, COLOURS[category])
        x += slots * slot
    picture.area(x, y, slot * on_top, BAR, colour)


def _draw_legend(picture: Drawing, y: float) -> None:
    entries = [(category.replace("_", " "), COLOURS[category]) for category, _ in PARTS]
    entries += [("fetched weights", COLOURS[Category.WEIGHTS] + PASSING), ("on other cards", PALE)]
    for number, (entry, colour) in enumerate(entries):
        picture.area(number * WIDTH / len(entries), y, 12, 12, colour)
        picture.words(number * WIDTH / len(entries) + 17, y + 11, entry, size=12)
