"""Pictures of cards as bars: the parts that fill them, and the recipes that fit."""

from collections.abc import Sequence
from dataclasses import replace

from workbench.advise.message import ErrorMessage
from workbench.advise.plan import Plan
from workbench.base.categories import Category, format_bytes
from workbench.lessons.drawing import EMPTY, PALE, WIDTH, Drawing
from workbench.measure.out_of_memory import two_digits
from workbench.prediction.prediction import Prediction
from workbench.techniques.registry import in_words

PARTS = {"tensors": Category.WEIGHTS, "gaps": PALE, "not PyTorch's": Category.TEMPORARIES, "free": EMPTY}
WEIGHTS = (120, Category.WEIGHTS, "weights")
FREE = (30, EMPTY, "")
# each shortage, and the card's parts from left to right: width, colour, and label
SHORTAGES = {
    "1. The recipe is too large: one category fills the card": (
        WEIGHTS,
        (410, Category.ACTIVATIONS, "activations"),
        FREE,
    ),
    "2. Something is left from before: the recipe alone would fit": (
        (190, PALE, "from before"),
        WEIGHTS,
        (220, Category.ACTIVATIONS, "activations"),
        FREE,
    ),
    "3. Gaps: enough is free, and no piece is large enough": (
        WEIGHTS,
        *((44, Category.ACTIVATIONS, ""), (44, EMPTY, "")) * 5,
    ),
}
# each moment, and the suspects with their colours
MOMENTS: dict[str, dict[str, str]] = {
    "at the loss, first step": {
        "activations": Category.ACTIVATIONS,
        "logits": Category.LOGITS_AND_LOSS,
        "attention T²": Category.ACTIVATIONS,
    },
    "end of the backward pass": {"gradients": Category.GRADIENTS, "buckets": PALE},
    "first AdamW step": {"states": Category.OPTIMIZER_STATES, "copies": PALE},
    "a late step": {"a long batch": Category.ACTIVATIONS, "kept losses": PALE, "gaps": PALE},
    "evaluation, generation": {
        "kept logits": Category.LOGITS_AND_LOSS,
        "a graph": Category.ACTIVATIONS,
        "keys, values": PALE,
    },
    "the second try": {"the first try": PALE, "host memory": PALE},
}
# share of the longest bar: a category that has less in every row cannot be seen, and is not in the legend
VISIBLE_SHARE = 0.002


def planned_sets(planned: Plan) -> Drawing:
    """Lesson 14: draw every set of changes that the planner predicted, in the order of the search.

    The length of a bar is the set's need, its colour that of the largest category. A set fits if its bar ends left of
    the line.
    """
    budget = format_bytes(planned.budget_bytes)
    fitting = sum(candidate.fits for candidate in planned.tried)
    picture = Drawing(
        f"{len(planned.tried)} sets of changes in the order of the search, as bars; "
        f"{fitting} of them end left of the line of the budget, {budget}."
    )
    scale = WIDTH / max(planned.budget_bytes, *(candidate.needed_bytes for candidate in planned.tried))
    largest = []
    for candidate in planned.tried:
        category, _ = candidate.dominant
        largest.append(category)
        verdict = "✓" if candidate.fits else "✗"
        label = f"{verdict} {format_bytes(candidate.needed_bytes)}: {in_words(candidate.label)}"
        picture.row(label, [(candidate.needed_bytes, category, "")], scale)
        picture.line(planned.budget_bytes * scale, 14, planned.budget_bytes * scale, 40)
    picture.legend(*dict.fromkeys(largest))
    picture.text(WIDTH, 11, f"the line is the budget, {budget}", anchor="end")
    return picture


def three_shortages() -> Drawing:
    """Lesson 15: draw three full cards, each for another reason; below each stands the same request."""
    picture = Drawing(
        "Three cards and the same request, for which none has room. "
        "The first is full of activations; the second holds something from before; "
        "the third has enough free memory, in pieces that are each too small."
    )
    for title, parts in SHORTAGES.items():
        picture.title(title)
        picture.bar(0, 0, 34, parts)
        start = sum(width for width, *_ in parts[:-1])
        picture.area(start, 38, 76, 14, Category.ACTIVATIONS)
        picture.text(start - 6, 50, "request", anchor="end")
    return picture


def message_bar(*messages: ErrorMessage) -> Drawing:
    """Lesson 16: draw the card as one bar, cut into the numbers of a message.

    The request stands above the free memory. Each message has a row, to the scale of its card.
    """
    picture = Drawing(f"Each bar is a whole card. {'; '.join(map(_describe, messages))}.")
    for message in messages:
        _draw_card(picture, message)
    picture.legend(others={**PARTS, "asked for": Category.ACTIVATIONS})
    return picture


def _draw_card(picture: Drawing, message: ErrorMessage) -> None:
    capacity = message.whole_bytes
    if not capacity:
        picture.title("The message does not say how much the card has.")
        return
    requested = message.requested_bytes or 0
    picture.title(f"{two_digits(requested)} asked for, of {two_digits(capacity)}")
    scale = WIDTH / capacity
    parts = []
    end = 0
    for part, size in _parts(message).items():
        size = min(size, capacity)
        parts.append((size, PARTS[part], f"{part} {two_digits(size)}"))
        end += size
    picture.bar(0, 26, 34, parts, scale)
    # The request stands above the last part, the free memory. One that is too wide ends where the card ends.
    free = min(end, capacity) - size
    start = max(min(free, capacity - requested), 0)
    picture.area(start * scale, 0, min(max(requested * scale, 3), WIDTH), 20, Category.ACTIVATIONS)
    if message.allowed_bytes is not None:
        limit = message.allowed_bytes * scale
        picture.line(limit, -4, limit, 64, "dashed")
        picture.text(limit + 4, 76, f"{two_digits(message.allowed_bytes)} allowed")


def _parts(message: ErrorMessage) -> dict[str, int]:
    """Return the bytes of each part of the card, from left to right."""
    return {
        "tensors": message.allocated_bytes or 0,
        "gaps": message.unallocated_bytes or 0,
        "not PyTorch's": message.elsewhere_bytes or 0,
        "free": message.free_bytes or 0,
    }


def _describe(message: ErrorMessage) -> str:
    parts = ", ".join(f"{two_digits(size)} {part}" for part, size in _parts(message).items())
    return f"Of {two_digits(message.whole_bytes or 0)}: {parts}; {two_digits(message.requested_bytes or 0)} asked for"


def rungs(ladder: Sequence[Prediction]) -> Drawing:
    """Lesson 17: draw a bar a recipe, each with one technique more: the peak by category and as a part of the first."""
    first = ladder[0].peak_allocated_bytes
    last = ladder[-1].peak_allocated_bytes
    picture = Drawing(
        f"{len(ladder)} bars, each with one technique more than the one above it. The first, "
        f"of the plain recipe, is {format_bytes(first)} long; the last is {format_bytes(last)}, "
        f"1/{first / last:.1f} of it."
    )
    below: tuple[object, ...] = ()
    for rung in ladder:
        recipe = rung.recipe
        new = tuple(technique for technique in recipe.techniques if technique not in below)
        below = recipe.techniques
        name = f"+ {in_words(replace(recipe, techniques=new).label)}" if new else recipe.model
        label = f"{name}: {format_bytes(rung.peak_allocated_bytes)}, 1/{first / rung.peak_allocated_bytes:.1f}"
        picture.row(label, [(rung.by_category[category], category, "") for category in Category], WIDTH / first)
    seen = []
    for category in Category:
        if max(rung.by_category[category] for rung in ladder) > VISIBLE_SHARE * first:
            seen.append(category)
    picture.legend(*seen)
    return picture


def when_it_died() -> Drawing:
    """Lesson 19: draw a row for each moment at which a run dies, with the parts that are usually the largest then."""
    suspects = "; ".join(f"{moment}: {', '.join(parts)}" for moment, parts in MOMENTS.items())
    picture = Drawing(f"When a run died, and what to suspect. {suspects}.")
    for moment, parts in MOMENTS.items():
        picture.row(moment, [(1, colour, part) for part, colour in parts.items()], WIDTH / 3)
    return picture
