"""One set of changes to a recipe, with the memory that it is predicted to need. Planner and doctor both show it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.base.settings import non_default_settings
from workbench.gpus.roofline import RATES, flops, seconds
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe, as_command
from workbench.techniques import Numerics, Technique

NUMERICS = tuple(Numerics)  # in the order from the best to the worst

# A predictor takes a recipe and a GPU's name or "cpu", and for one rank of several the other arguments of `predict`.
Predictor = Callable[..., Prediction]


@dataclass(frozen=True)
class Candidate(Result):
    """A recipe with changes, its prediction, and its budget.

    Args:
        recipe: the recipe after the changes.
        changes: the techniques that were added or set.
        predicted: the prediction of the recipe.
        budget_bytes: the memory that the recipe may need.
        compared_with: the candidate without the changes, against which they save and cost; None is this one.
        options: the part of `command` after the recipe.
    """

    recipe: Recipe
    changes: tuple[Technique, ...]
    predicted: Prediction
    budget_bytes: int
    compared_with: "Candidate | None" = None
    options: str = ""
    json_fields = (
        "label",
        "words",
        "recipe",
        "numerics",
        "needed_bytes",
        "headroom_bytes",
        "saved_bytes",
        "fits",
        "extra_compute",
        "extra_time",
        "gives_up",
        "command",
    )

    @property
    def needed_bytes(self) -> int:
        """The memory that the device must have (`Prediction.need_bytes`)."""
        return self.predicted.need_bytes

    @property
    def headroom_bytes(self) -> int:
        """The part of the budget that is left; negative if the recipe does not fit."""
        return self.budget_bytes - self.needed_bytes

    @property
    def room(self) -> str:
        """The distance from the budget, in words: `3.1 GiB to spare`."""
        return room_in_words(self.headroom_bytes)

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def before(self) -> "Candidate":
        """The candidate without the changes."""
        return self.compared_with or self

    @property
    def saved_bytes(self) -> int:
        return self.before.needed_bytes - self.needed_bytes

    @property
    def extra_compute(self) -> float:
        """The additional floating-point operations of all steps: 0.33 is a third more than without the changes."""
        return self._extra(flops)

    @property
    def extra_time(self) -> float:
        """The additional time of all steps on this device: an estimate, the ratio of two lower bounds
        (`gpus/roofline.py`).

        Against 33 recipes of GPT-2 124M on an H100 it is off by a factor of 1.24 on average: in fp32 by 1.06, at worst
        1.40; in half precision by 1.5, at worst 1.9, for the card then waits for launches; and by 5.8 where
        micro-batches are small too (`data/reference/README.md`, and there too for a CPU).
        """
        return self._extra(lambda work: seconds(work, RATES[self.predicted.gpu]))

    def _extra(self, measure: Callable[[Mapping[str, int]], float]) -> float:
        """Return by which part a measure of all steps grows. A technique may change how many steps there are."""
        totals = []
        for candidate in (self.before, self):
            steps = candidate.recipe.training_arguments()["max_steps"]
            totals.append(measure(candidate.predicted.work) * steps)
        before, after = totals
        return after / before - 1 if before else 0.0

    @property
    def cost(self) -> str:
        """The additional operations and time, and the bytes that are moved, in words."""
        bus_bytes = self.predicted.work.get("bus_bytes", 0)
        moved = f", {format_bytes(bus_bytes)} moved a step" if bus_bytes else ""
        return f"{self.extra_compute:+.0%} operations, about {self.extra_time:+.0%} time (estimate){moved}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(change.name for change in self.changes)

    @property
    def numerics(self) -> Numerics:
        """The numerics of the change that alters the loss most."""
        return worst_numerics(self.changes)

    @property
    def gives_up(self) -> tuple[str, ...]:
        """The cost of each change, in the technique's own words."""
        return costs_of(self.changes)

    @property
    def label(self) -> str:
        return replace(self.recipe, techniques=self.changes).label if self.changes else "no change"

    @property
    def words(self) -> str:
        """The changes as instructions: "Turn on …" or "Set …"."""
        return "; ".join(_instruction(change, self.before.recipe) for change in self.changes)

    @property
    def command(self) -> str:
        return f"{as_command(self.recipe)} {self.options}".rstrip()

    @property
    def dominant(self) -> tuple[str, int]:
        """The largest category at the peak, and its bytes."""
        sizes = self.predicted.by_category
        largest = max(sizes, key=sizes.__getitem__)
        return largest, sizes[largest]


def rank(candidate: Candidate) -> tuple[int, float, int, int]:
    """Return the key by which candidates are sorted, the best first.

    Exact ones come before approximate and different ones. Then less time (to the per mille), fewer changes and less
    memory are better.
    """
    order = NUMERICS.index(candidate.numerics)
    return (order, round(candidate.extra_time, 3), len(candidate.changes), candidate.needed_bytes)


def entry(candidate: Candidate, heading: str, compared: str) -> list[str]:
    """Return the lines of one candidate in a list of several.

    Args:
        compared: how much less it needs than the recipe as it is, or how much is to spare.
    """
    need = f"{format_bytes(candidate.needed_bytes)}, {compared}; loss {candidate.numerics}; {candidate.cost}"
    return answer_lines(heading, need, candidate.gives_up, [candidate.command])


def answer_lines(heading: str, need: str, gives_up: Iterable[str], ways: Iterable[str]) -> list[str]:
    """Return the lines of a set of changes: its heading, what it needs and gives up, and the ways to make it.

    Recipes and scripts of others are answered alike.
    """
    costs = map("   gives up  {}".format, gives_up)
    return [heading, f"   needs {need}", *costs, *map("   {}".format, ways)]


def room_in_words(headroom_bytes: int) -> str:
    """Return `3.1 GiB to spare`, or `3.1 GiB too much` if the headroom is negative."""
    return f"{format_bytes(abs(headroom_bytes))} {'to spare' if headroom_bytes >= 0 else 'too much'}"


def worst_numerics(techniques: Iterable[Technique | type[Technique]]) -> Numerics:
    """Return the numerics of the technique that alters the loss most."""
    return max((technique.numerics for technique in techniques), key=NUMERICS.index, default=Numerics.EXACT)


def costs_of(techniques: Iterable[Technique]) -> tuple[str, ...]:
    """Return what each technique costs, in its own words."""
    return tuple(f"{technique.title}: {technique.costs} (loss: {technique.numerics})" for technique in techniques)


def _instruction(change: Technique, recipe: Recipe) -> str:
    """Return what to turn on, or what to set if the recipe has the technique already."""
    settings = change.settings()
    for technique in recipe.techniques:
        if technique.name == change.name:
            now = technique.settings()
            changed = []
            for name, value in settings.items():
                if value != now[name]:
                    changed.append(f"{name} to {value} (now {now[name]})")
            return f"Set {change.title} {', '.join(changed)}"
    if len(settings) > 1:
        settings = non_default_settings(change)
    telling = ", ".join(f"{name}={value}" for name, value in settings.items())
    return f"Turn on {change.title} with {telling}" if telling else f"Turn on {change.title}"
