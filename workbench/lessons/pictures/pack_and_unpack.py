"""Lesson 10b: what two hooks do with each tensor that the forward pass saves for the backward pass."""

from workbench.base.categories import Category
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

TENSOR = COLOURS[Category.ACTIVATIONS]
WEIGHT = COLOURS[Category.WEIGHTS]


def pack_and_unpack() -> Drawing:
    """Autograd's shelf in the middle: a saved activation goes to a file and comes back, a weight stays as it is."""
    picture = Drawing(
        660,
        176,
        "The forward pass saves an activation and a weight. The hook named pack writes the activation to a file and "
        "gives autograd its path, and gives the weight back as it is. The hook named unpack reads the file again for "
        "the backward pass.",
    )
    for x, name in ((0, "forward pass"), (268, "autograd keeps"), (520, "backward pass")):
        picture.words(x, 16, name, bold=True)
    for x, colour, label in ((0, TENSOR, "activation"), (268, "none", "a path"), (520, TENSOR, "activation")):
        picture.area(x, 30, 120, 34, colour, label)
    for x in (0, 268, 520):
        picture.area(x, 130, 120, 34, WEIGHT, "weight")
    for y in (47, 147):
        picture.line(124, y, 264, y, arrow=True)
        picture.line(392, y, 516, y, arrow=True)
        picture.words(194, y - 8, "pack", anchor="middle")
        picture.words(454, y - 8, "unpack", anchor="middle")
    picture.area(268, 86, 120, 26, TENSOR, "file")
    picture.line(176, 50, 264, 96, arrow=True)
    picture.line(392, 98, 470, 52, arrow=True)
    return picture
