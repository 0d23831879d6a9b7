"""Pictures of weights, gradients and states: those of all parameters, or of the few that an adapter trains."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import EMPTY, PALE, WIDTH, Drawing
from workbench.lessons.pictures.by_hand import FP32, block_parameters, parameters
from workbench.lessons.plots import COLOURS

# the bytes of a parameter, in the order in which they are drawn; the meter counts 16-bit copies as activations
PARTS = {
    "weight": Category.WEIGHTS,
    "gradient": Category.GRADIENTS,
    "optimizer states": Category.OPTIMIZER_STATES,
    "16-bit copy": Category.ACTIVATIONS,
}
DIGITS = {"fp32": 23, "fp16": 10, "bf16": 7}  # bits of the mantissa
LINE = 580  # units: the length of a line of numbers
# the matrices that a full fine-tuning with AdamW keeps for a weight
TRAINED = {
    "W": Category.WEIGHTS,
    "gradient": Category.GRADIENTS,
    "Adam's mean": Category.OPTIMIZER_STATES,
    "mean of squares": Category.OPTIMIZER_STATES,
}
UNIT = 36.0  # units: the width of C numbers
# the matrices of a block: the left end of each, and its numbers as a multiple of C × C
MATRICES = {"c_attn": (160.0, 3), "c_proj": (282.0, 1), "c_fc": (332.0, 4), "c_proj (MLP)": (490.0, 4)}
# the numbers that an adapter trains, as a strip beside the matrices: x, y, width, height
Strip = tuple[float, float, float, float]
STRIPS: tuple[Strip, ...] = ((152, 0, 5, UNIT), (160, -8, 3 * UNIT, 5))
FACTORS = (160, UNIT + 3, 3 * UNIT, 2.5)
ADAPTERS: dict[str, tuple[Strip, ...]] = {
    "LoRA": STRIPS,
    "DoRA": (*STRIPS, FACTORS),
    "(IA)³": (FACTORS, (490, -6, 4 * UNIT, 2.5)),
    "prompt tuning": ((136, 0, 10, UNIT),),
    "QLoRA": STRIPS,
}
# the numbers that each parameter has of a category
SHARDED = {Category.WEIGHTS: 1, Category.GRADIENTS: 1, Category.OPTIMIZER_STATES: 2}
# the colour of weights that are fetched for a while: half transparent
PASSING = COLOURS[Category.WEIGHTS] + "70"
GAP = 12  # units between two cards


def bytes_per_parameter(rows: Mapping[str, Sequence[float]]) -> Drawing:
    """Lesson 04b: draw a bar for each way to train: its bytes of weight, gradient, states and copy, in this order."""
    sums = ", ".join(f"{name} {sum(sizes):.3g}" for name, sizes in rows.items())
    picture = Drawing(f"Bytes for each parameter: {sums}.")
    scale = WIDTH / max(map(sum, rows.values()))
    for name, sizes in rows.items():
        parts = zip(sizes, PARTS.values(), map("{:.3g}".format, sizes), strict=False)
        picture.row(f"{name}: {sum(sizes):.3g}", parts, scale)
    shown = max(map(len, rows.values()))
    picture.legend(others=dict(islice(PARTS.items(), shown)))
    return picture


def optimizer_bytes(config: Any) -> Drawing:
    """Lesson 09: draw weight, gradient and states in bytes, on average over the parameters of such a model."""
    width = config.n_embd
    whole = parameters(config)
    matrices = 12 * width**2 * config.n_layer
    others = whole - matrices  # embeddings and vectors
    embedded = config.vocab_size + config.n_positions
    # rows and columns of embeddings and matrices
    sides = embedded + 2 * width + 16 * width * config.n_layer
    states = {
        "AdamW": 8 * whole,
        "Muon": 4 * matrices + 8 * others,
        # bitsandbytes leaves those of embeddings and vectors in 32 bits; each 256 numbers share a scale
        "AdamW, 8-bit": (2 + 2 * 4 / 256) * matrices + 8 * others,
        "SGD, momentum": 4 * whole,
        "Adafactor": 4 * (sides + others - embedded * width),
        "SGD": 0,
    }
    return bytes_per_parameter({optimizer: (4.0, 4.0, size / whole) for optimizer, size in states.items()})


def number_line(weight: float, rates: Sequence[float]) -> Drawing:
    """Lesson 04: draw the numbers near a weight in three types, and an arrow for each rate, about one update of Adam.

    The numbers begin at a power of two, up to whose double all gaps are the same.
    """
    start = math.ldexp(1.0, math.frexp(weight)[1] - 1)
    gaps = {dtype: start / 2**digits for dtype, digits in DIGITS.items()}
    outcomes = {}
    for rate in rates:
        fp16 = round(rate / gaps["fp16"])
        bf16 = round(rate / gaps["bf16"])
        outcomes[rate] = f"rate {rate:g}: {fp16} × a gap of fp16, {bf16} × a gap of bf16"
    picture = Drawing(
        f"From {start:.2g} to {2 * start:.2g} the numbers of bf16 are {gaps['bf16']:.2g} apart, "
        "those of fp16 an eighth of that, and those of fp32 too close to draw. "
        f"{'; '.join(outcomes.values())}."
    )
    picture.title(f"the numbers from {start:.2g} on; up to {2 * start:.2g} the gaps stay the same")
    left = WIDTH - LINE - 20
    shown = min(max(6, math.ceil(max(rates) / gaps["bf16"])), 12)  # gaps of bf16
    scale = LINE / (shown * gaps["bf16"])
    for row, (dtype, gap) in enumerate(gaps.items()):
        y = 36 * row
        picture.text(0, y + 17, dtype)
        picture.line(left, y + 11, left + LINE, y + 11)
        if dtype == "fp32":  # 65,536 numbers for one gap of bf16
            picture.area(left, y, LINE, 22, Category.WEIGHTS)
            continue
        for number in range(round(shown * gaps["bf16"] / gap) + 1):
            picture.area(left - 1.5 + number * gap * scale, y, 3, 22, Category.WEIGHTS)
    half = left + scale * gaps["bf16"] / 2
    y = 100
    for rate, outcome in outcomes.items():
        picture.text(half + 8, y + 26, outcome)
        picture.line(left, y + 36, left + min(scale * rate, LINE), y + 36, "arrow")
        y += 44
    picture.line(half, 74, half, y + 14, "dashed")
    picture.text(half + 8, y + 16, "half a gap of bf16: a smaller update is rounded away")
    return picture


def low_rank_update(config: Any, rank: int) -> Drawing:
    """Lesson 05: draw the matrix of the attention's input under full fine-tuning, and below it under LoRA, to scale."""
    width = config.n_embd
    shape = f"{width:,} × {3 * width:,}"
    picture = Drawing(
        f"Full fine-tuning keeps four matrices of {shape} numbers: W, "
        "its gradient and two states of Adam. LoRA keeps W, frozen; "
        f"the other three are empty but for two strips that are {rank} numbers thin."
    )
    column = WIDTH / len(TRAINED)
    high = 48
    thick = max(1.0, rank / width * high)
    picture.title(f"full fine-tuning: {shape} = {3 * width * width:,} numbers, four times")
    for number, (name, colour) in enumerate(TRAINED.items()):
        picture.area(12 + number * column, 0, 3 * high, high, colour, name)
    picture.title(f"LoRA: W once, and A and B four times, {4 * rank * width:,} numbers, drawn to scale")
    for number, colour in enumerate(TRAINED.values()):
        x = 12 + number * column
        matrix = PALE
        what = "A left, B above"
        if number == 0:
            matrix = colour
            what = "W is frozen"
        picture.area(x, 12, 3 * high, high, matrix)
        picture.area(x - 3 - thick, 12, thick, high, colour)
        picture.area(x, 9 - thick, 3 * high, thick, colour)
        picture.text(x, 30 + high, what)
    return picture


def block_adapters(config: Any, rank: int, virtual_tokens: int) -> Drawing:
    """Lesson 08: draw the four matrices of a block in grey, five times, and in colour the numbers that are trained."""
    width = config.n_embd
    low_rank = 4 * rank * width * config.n_layer
    factors = width * config.n_layer
    trained = (low_rank, low_rank + 3 * factors, 7 * factors, virtual_tokens * width, low_rank)
    picture = Drawing(
        "The four matrices of a block, once for each adapter. LoRA, "
        "DoRA and QLoRA train two strips beside the first, DoRA one number more for each of its "
        "columns; (IA)³ a row of factors at the first and at the last; "
        "prompt tuning nothing in the block, only tokens in front of it. "
        "Of the matrices of QLoRA an eighth is filled."
    )
    picture.text(0, 16, "trained, all blocks")
    for name, (x, times) in MATRICES.items():
        picture.text(x + times * UNIT / 2, 16, name, anchor="middle")
    for row, (name, strips) in enumerate(ADAPTERS.items()):
        picture.top = 36.0 + 54 * row
        picture.text(0, 14, name, bold=True)
        picture.text(0, 31, f"{trained[row]:,}")
        filled = UNIT
        if name == "QLoRA":  # 4 bits of 32
            filled /= 8
        for x, times in MATRICES.values():
            picture.area(x, 0, times * UNIT, UNIT, EMPTY)
            picture.area(x, UNIT - filled, times * UNIT, filled)
        for strip in strips:
            picture.area(*strip, Category.OPTIMIZER_STATES)
    return picture


def shards(config: Any, ranks: int) -> Drawing:
    """Lesson 20: draw weights, gradients and states on each of several cards, under DDP and two settings of FSDP2."""
    numbers = parameters(config)
    # under `full` a card has the embeddings and one block at a time
    at_once = numbers - (config.n_layer - 1) * block_parameters(config)
    whole = format_bytes(4 * FP32 * numbers)
    part = format_bytes(4 * FP32 * numbers // ranks)
    weights = format_bytes(FP32 * numbers)
    picture = Drawing(
        f"Three rows of {ranks} cards. With none each keeps {whole} of weights, "
        "gradients and states, and buckets as large as the gradients. "
        f"With gradients and with full each keeps {part}, its own part of them; "
        "weights of the others come for a while, all of them with gradients, "
        "and few at a time with full."
    )
    moment = format_bytes(FP32 * at_once)
    # each row: title; number of parts into which all is cut; bytes on top, as a share of the weights, and their colour
    rows = (
        (f"none (DDP): {whole} each, and {weights} of buckets", 1, 1.0, Category.GRADIENTS),
        (f"gradients: {part} each, and for a while all weights, {weights}", ranks, 1.0, PASSING),
        (f"full: {part} each, and for a moment a block and embeddings, {moment}", ranks, at_once / numbers, PASSING),
    )
    width = (WIDTH + GAP) / ranks
    slot = (width - GAP) / (sum(SHARDED.values()) + 1)
    for title, cut, on_top, colour in rows:
        picture.title(title)
        for card in range(ranks):
            x = card * width
            for category, slots in SHARDED.items():
                kept = slots * slot / cut
                picture.area(x, 0, slots * slot, 24)
                picture.area(x + card % cut * kept, 0, kept, 24, category)
                x += slots * slot
            picture.area(x, 0, slot * on_top, 24, colour)
    picture.legend(*SHARDED, others={"fetched weights": PASSING, "on other cards": PALE})
    return picture
