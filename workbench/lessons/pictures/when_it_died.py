"""Lesson 19: the moments at which a run dies, and what is usually the largest part then."""

from workbench.base.categories import Category
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
TOP = 46
BOX = 30
ACTIVATIONS = COLOURS[Category.ACTIVATIONS]
LOGITS = COLOURS[Category.LOGITS_AND_LOSS]
# a moment in two lines, and what to suspect, each with its colour
MOMENTS = (
    ("at the loss,", "first step", (("activations", ACTIVATIONS), ("logits", LOGITS), ("attention T²", ACTIVATIONS))),
    ("end of the", "backward", (("gradients", COLOURS[Category.GRADIENTS]), ("buckets", PALE))),
    ("first", "AdamW step", (("states", COLOURS[Category.OPTIMIZER_STATES]), ("copies", PALE))),
    ("a late", "step", (("a long batch", ACTIVATIONS), ("kept losses", PALE), ("gaps", PALE))),
    ("evaluation,", "generation", (("kept logits", LOGITS), ("a graph", ACTIVATIONS), ("keys, values", PALE))),
    ("the second", "try", (("the first try", PALE), ("host memory", PALE))),
)


def when_it_died() -> Drawing:
    """A column for each moment of a run's life, with its suspects below."""
    suspects = "; ".join(
        f"{first} {second}: {', '.join(name for name, _ in boxes)}" for first, second, boxes in MOMENTS
    )
    picture = Drawing(WIDTH, TOP + 3 * BOX + 22, f"When a run died, and what to suspect. {suspects}.")
    column = WIDTH / len(MOMENTS)
    for number, (first, second, boxes) in enumerate(MOMENTS):
        x = number * column
        picture.words(x, 14, first, size=13, bold=True)
        picture.words(x, 30, second, size=13, bold=True)
        for row, (name, colour) in enumerate(boxes):
            picture.area(x, TOP + row * BOX, 12, BOX - 8, colour)
            picture.words(x + 18, TOP + row * BOX + 16, name, size=13)
    picture.line(0, TOP + 3 * BOX + 8, WIDTH - 2, TOP + 3 * BOX + 8, arrow=True)
    return picture
