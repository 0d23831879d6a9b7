"""Lessons 04b and 09: the bytes that training keeps for each parameter, stacked, to one scale."""

from collections.abc import Mapping, Sequence

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

# in the order in which they are stacked; the meter counts 16-bit copies among the activations
PARTS = {
    "weight": COLOURS[Category.WEIGHTS],
    "gradient": COLOURS[Category.GRADIENTS],
    "optimizer states": COLOURS[Category.OPTIMIZER_STATES],
    "16-bit copy": COLOURS[Category.ACTIVATIONS],
}
LEFT = 150
RIGHT = 600


def bytes_per_parameter(rows: Mapping[str, Sequence[float]]) -> Drawing:
    """A bar for each way to train, with its bytes of weight, gradient, states and copy, in this order."""
    totals = {name: sum(parts) for name, parts in rows.items()}
    sums = ", ".join(f"{name} {total:.3g}" for name, total in totals.items())
    picture = Drawing(660, 40 + 30 * len(rows), f"Bytes for each parameter: {sums}.")
    shown = max(len(parts) for parts in rows.values())
    x = LEFT
    for name, colour in [*PARTS.items()][:shown]:
        picture.area(x, 4, 14, 14, colour)
        picture.words(x + 20, 16, name)
        x += 50 + 8 * len(name)
    scale = (RIGHT - LEFT) / max(totals.values())
    for row, (name, parts) in enumerate(rows.items()):
        y = 34 + 30 * row
        picture.words(0, y + 17, name)
        end = float(LEFT)
        for size, colour in zip(parts, PARTS.values(), strict=False):
            if size * scale >= 1:
                picture.area(end, y, size * scale, 24, colour, f"{size:.3g}" if size * scale > 30 else "")
            end += size * scale
        picture.words(end + 8, y + 17, f"{totals[name]:.3g}", bold=True)
    return picture
