"""Lesson 18: what an evaluation needs beside the weights, to scale, with a metric that wants the logits and without."""

from typing import Any

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
ROW = 58
BAR = 24
LOGITS = COLOURS[Category.LOGITS_AND_LOSS]
WEIGHTS = COLOURS[Category.WEIGHTS]


def kept_logits(config: Any, sequences: int, length: int, batches: int) -> Drawing:
    """Bars on one scale: the weights; a batch evaluated; all batches kept, and joined; the likeliest tokens alone."""
    width = config.n_embd
    vocabulary = config.vocab_size
    parameters = (vocabulary + config.n_positions) * width + config.n_layer * (12 * width + 13) * width + 2 * width
    weights = 4 * parameters
    logits = 4 * sequences * length * vocabulary
    best = 8 * sequences * length
    rows = [
        ("the weights", [weights], WEIGHTS),
        (f"one batch, {sequences} × {length} tokens: its logits, and their log-softmax", [logits] * 2, LOGITS),
        (
            f"compute_metrics: the logits of {batches} batches, and once more to join them",
            [logits] * 2 * batches,
            LOGITS,
        ),
        (f"{batches} batches, and of each only the likeliest tokens are kept", [logits] * 2 + [best] * batches, LOGITS),
    ]
    picture = Drawing(
        WIDTH,
        ROW * len(rows),
        f"Bars to scale. Weights {format_bytes(weights)}; one evaluated batch {format_bytes(2 * logits)}; the logits "
        f"of {batches} batches, kept and joined, {format_bytes(2 * batches * logits)}; with the likeliest tokens alone "
        f"hardly more than one batch.",
    )
    pixels = WIDTH / max(weights, 2 * batches * logits)
    for row, (label, parts, colour) in enumerate(rows):
        picture.words(0, row * ROW + 16, f"{label}: {format_bytes(sum(parts))}", bold=True)
        picture.area(0, row * ROW + 24, WIDTH, BAR, PALE)
        x = 0.0
        for part in parts:
            picture.area(x, row * ROW + 24, part * pixels, BAR, colour)
            x += part * pixels
    return picture
