"""Lesson 14: every set of changes that the planner predicted, against the budget."""

from workbench.advise.plan import Plan
from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import Drawing
from workbench.lessons.plots import COLOURS

WIDTH = 660
ROW = 38
BAR = 16


def planned_sets(planned: Plan) -> Drawing:
    """In the order of the search: a set needs as much as its bar is long, and what is largest there gives the colour.

    What reaches no further than the line fits.
    """
    fitting = sum(candidate.fits for candidate in planned.tried)
    largest = max(candidate.needed_bytes for candidate in planned.tried)
    scale = (WIDTH - 90) / largest
    limit = planned.budget_bytes * scale
    picture = Drawing(
        WIDTH,
        ROW * len(planned.tried) + 44,
        f"{len(planned.tried)} sets of changes in the order of the search, as bars; {fitting} of them end left of the "
        f"line of the budget, {format_bytes(planned.budget_bytes)}.",
    )
    colours = {}
    for row, candidate in enumerate(planned.tried):
        category, _ = candidate.dominant
        colours[category] = COLOURS[Category(category)]
        y = row * ROW + 20
        width = candidate.needed_bytes * scale
        picture.words(0, y + 13, candidate.label, size=13, bold=candidate.fits)
        picture.area(0, y + 17, width, BAR, colours[category])
        verdict = " fits" if candidate.fits else ""
        picture.line(limit, y + 14, limit, y + 36)
        picture.words(
            max(width, limit if candidate.fits else 0) + 6,
            y + 30,
            f"{format_bytes(candidate.needed_bytes)}{verdict}",
            size=12,
        )
    picture.line(limit, 2, limit, 18)
    picture.words(limit + 6, 14, f"budget {format_bytes(planned.budget_bytes)}", size=12)
    x = 0.0
    for category, colour in colours.items():
        picture.area(x, ROW * len(planned.tried) + 27, 12, 12, colour)
        picture.words(x + 18, ROW * len(planned.tried) + 37, category.replace("_", " "), size=12)
        x += 125
    return picture
