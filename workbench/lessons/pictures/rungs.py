"""Lesson 17: what recipes need that have one technique more each, to scale."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS
from workbench.prediction.prediction import Prediction

WIDTH = 660
LEFT = 224  # of the bars; the names of the techniques stand before them
LONGEST = 350
ROW = 32
BAR = 22
IN_A_ROW = 4  # of the legend
SEEN = 0.002  # of the longest bar: a category that has less in every row is not in the legend


def rungs(ladder: Sequence[Prediction]) -> Drawing:
    """One bar a rung, from the plain recipe down: its peak by category, and what part of the first one it is."""
    first = ladder[0].peak_allocated_bytes
    last = ladder[-1].peak_allocated_bytes
    legend = ROW * len(ladder) + 8
    picture = Drawing(
        WIDTH,
        legend + 36,
        f"{len(ladder)} bars, each with one technique more than the one above it. The first, of the plain recipe, is "
        f"{format_bytes(first)} long; the last is {format_bytes(last)}, 1/{first / last:.1f} of it.",
    )
    below: tuple[object, ...] = ()
    for number, rung in enumerate(ladder):
        recipe = rung.recipe
        new = tuple(technique for technique in recipe.techniques if technique not in below)
        name = f"+ {replace(recipe, techniques=new).label}" if new else f"{recipe.model}, nothing on"
        _draw_rung(picture, number * ROW, name, rung, first)
        below = recipe.techniques
    seen = [name for name in Category if any(rung.by_category[name] > SEEN * first for rung in ladder)]
    _draw_legend(picture, legend, seen)
    return picture


def _draw_rung(picture: Drawing, y: float, name: str, rung: Prediction, first: int) -> None:
    picture.words(0, y + 16, name, size=13)
    x = float(LEFT)
    for category in Category:
        length = LONGEST * rung.by_category[category] / first
        if length:
            picture.area(x, y, length, BAR, COLOURS[category])
        x += length
    peak = rung.peak_allocated_bytes
    share = "" if peak == first else f", 1/{first / peak:.1f}"
    picture.words(x + 6, y + 16, format_bytes(peak) + share, size=13)


def _draw_legend(picture: Drawing, y: float, categories: Sequence[Category]) -> None:
    for number, category in enumerate(categories):
        row, column = divmod(number, IN_A_ROW)
        x = column * WIDTH / IN_A_ROW
        picture.area(x, y + row * 20, 12, 12, COLOURS[category])
        picture.words(x + 17, y + row * 20 + 11, category.replace("_", " "), size=12)
