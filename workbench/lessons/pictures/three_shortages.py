"""Lesson 15: three cards that are full, each for another reason, and the request that comes last."""

from workbench.base.categories import Category
from workbench.lessons.drawing import PALE, Drawing
from workbench.lessons.plots import COLOURS

CARD = 560
ROW = 88
BAR = 34
WEIGHTS = COLOURS[Category.WEIGHTS]
ACTIVATIONS = COLOURS[Category.ACTIVATIONS]
FREE = "none"
REQUEST = 76  # the same in each row
GAPS = ((46, ACTIVATIONS), (44, FREE)) * 5
# what it is, and the card's parts from left to right: width, colour, and words
ROWS = (
    (
        "1. The recipe is too large: one category fills the card",
        ((120, WEIGHTS, "weights"), (410, ACTIVATIONS, "activations"), (30, FREE, "")),
    ),
    (
        "2. Something is left from before: the recipe alone would fit",
        ((190, PALE, "from before"), (120, WEIGHTS, "weights"), (220, ACTIVATIONS, "activations"), (30, FREE, "")),
    ),
    (
        "3. Gaps: enough is free, and no piece is large enough",
        ((110, WEIGHTS, "weights"), *((width, colour, "") for width, colour in GAPS)),
    ),
)


def three_shortages() -> Drawing:
    """Below each card's bar stands the request, as wide as it is."""
    picture = Drawing(
        660,
        ROW * len(ROWS) + 4,
        "Three cards and the same request, for which none has room. The first is full of activations; the second holds "
        "something from before; the third has enough free memory, in pieces that are each too small.",
    )
    for row, (title, parts) in enumerate(ROWS):
        y = row * ROW
        picture.words(0, y + 16, title, bold=True)
        x = 0.0
        for width, colour, label in parts:
            picture.area(x, y + 24, width, BAR, colour, label)
            x += width
        start = CARD - 30 if row < 2 else CARD - 44
        picture.area(start, y + 24 + BAR + 4, REQUEST, 14, ACTIVATIONS)
        picture.words(start - 6, y + 24 + BAR + 15, "request", anchor="end", size=12)
    return picture
