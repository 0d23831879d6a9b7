"""One set of changes to a recipe, with what it is predicted to need, as the planner and the doctor show it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from workbench.export.written import as_command
from workbench.gpus.roofline import RATES, flops, seconds
from workbench.measure.categories import format_bytes
from workbench.predict.prediction import Prediction
from workbench.recipe import Recipe
from workbench.techniques import Numerics, Technique

NUMERICS = tuple(Numerics)  # from the best to the worst


Predictor = Callable[..., Prediction]  # of a recipe, for a GPU's name or "cpu"; and of a rank, as `predict` has it


@dataclass(frozen=True)
class Candidate:
    """A recipe after `changes`, predicted, against a budget.

    Args:
        recipe: with the changes in it.
        budget_bytes: what it may need.
        compared_with: the recipe without the changes, for what they save and cost; None: this one.
        options: what `command` says besides the recipe.
    """

    recipe: Recipe
    changes: tuple[Technique, ...]
    predicted: Prediction
    budget_bytes: int
    compared_with: "Candidate | None" = None
    options: str = ""

    @property
    def needed_bytes(self) -> int:
        """All that the device must give: what the allocator reserves, and the context.

        Cached memory that PyTorch would give back near the limit counts, so the answer errs on the safe side.
        """
        predicted = self.predicted
        return (predicted.peak_reserved_bytes or predicted.peak_allocated_bytes) + predicted.context_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.budget_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def saved_bytes(self) -> int:
        return (self.compared_with or self).needed_bytes - self.needed_bytes

    @property
    def extra_compute(self) -> float:
        """In floating-point operations of all steps: 0.33 is a third more than the recipe without the changes."""
        return self._extra(flops)

    @property
    def extra_time(self) -> float:
        """The same in seconds on this device: an estimate, the ratio of two lower bounds (`gpus/roofline.py`).

        Against 33 recipes of GPT-2 124M on an H100 it is off by a factor of 1.24 on average: in fp32 by 1.06, at worst
        1.40; in half precision by 1.5, at worst 1.9, for the card then waits for launches; and by 5.8 where
        micro-batches are small too (`data/reference/README.md`, and there too for a CPU).
        """
        return self._extra(lambda work: seconds(work, RATES[self.predicted.gpu]))

    def _extra(self, measure: Callable[[Mapping[str, int]], float]) -> float:
        """Of all steps: a technique may change how many there are."""

        def total(candidate: Candidate) -> float:
            steps = int(candidate.recipe.training_arguments()["max_steps"])
            return measure(candidate.predicted.work) * steps

        before = total(self.compared_with or self)
        return total(self) / before - 1 if before else 0.0

    @property
    def cost(self) -> str:
        """Operations, time, and the bytes that wait elsewhere, in words."""
        size = self.predicted.work.get("bus_bytes", 0)
        moved = f", {format_bytes(size)} moved a step" if size else ""
        return f"{self.extra_compute:+.0%} operations, about {self.extra_time:+.0%} time (estimate){moved}"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(change.name for change in self.changes)

    @property
    def numerics(self) -> Numerics:
        """That of the change which alters the loss most."""
        return max((change.numerics for change in self.changes), key=NUMERICS.index, default=Numerics.EXACT)

    @property
    def gives_up(self) -> tuple[str, ...]:
        """What each change costs, in the technique's own words."""
        return tuple(f"{change.name}: {change.costs} (loss: {change.numerics})" for change in self.changes)

    @property
    def label(self) -> str:
        return replace(self.recipe, techniques=self.changes).label if self.changes else "no change"

    @property
    def words(self) -> str:
        """What to do: "Turn on …" or "Set …"."""
        return "; ".join(_words(change, (self.compared_with or self).recipe) for change in self.changes)

    @property
    def command(self) -> str:
        return f"{as_command(self.recipe)} {self.options}".rstrip()

    @property
    def dominant(self) -> tuple[str, int]:
        """The largest category at the peak."""
        return max(self.predicted.by_category.items(), key=lambda entry: entry[1])

    def row(self) -> dict[str, Any]:
        """For `plots.memory_bars`: the columns that a record's row has too."""
        parts = {f"{category}_bytes": size for category, size in self.predicted.by_category.items()}
        peak = self.predicted.peak_allocated_bytes
        return {"label": self.label, "memory_source": "predicted", "peak_allocated_bytes": peak, **parts}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "label": self.label,
            "words": self.words,
            "recipe": self.recipe.to_dict(),
            "changes": {change.name: change.settings() for change in self.changes},
            "numerics": str(self.numerics),
            "needed_bytes": self.needed_bytes,
            "predicted_bytes": self.needed_bytes,  # what `doctor --json` calls it
            "headroom_bytes": self.headroom_bytes,
            "saved_bytes": self.saved_bytes,
            "fits": self.fits,
            "peak_allocated_bytes": self.predicted.peak_allocated_bytes,
            "peak_reserved_bytes": self.predicted.peak_reserved_bytes,
            "context_bytes": self.predicted.context_bytes,
            "by_category": dict(self.predicted.by_category),
            "extra_compute": self.extra_compute,
            "extra_time": self.extra_time,
            "gives_up": list(self.gives_up),
            "command": self.command,
        }


def rank(candidate: Candidate) -> tuple[int, float, int, int]:
    """Exact before approximate before different; then less time (to the per mille), fewer changes, less memory."""
    order = NUMERICS.index(candidate.numerics)
    return (order, round(candidate.extra_time, 3), len(candidate.changes), candidate.needed_bytes)


def entry(candidate: Candidate, heading: str, compared: str, gives_up: Iterable[str]) -> list[str]:
    """The lines of one candidate in a list of several; `compared` says how much less, or how much to spare."""
    return [
        heading,
        f"   needs {format_bytes(candidate.needed_bytes)}, {compared}; loss {candidate.numerics}; {candidate.cost}",
        *(f"   gives up  {text}" for text in gives_up),
        f"   {candidate.command}",
    ]


def _words(change: Technique, recipe: Recipe) -> str:
    """One line: what to turn on, or what to set."""
    settings = change.settings()
    for technique in recipe.techniques:
        if technique.name == change.name:
            before = technique.settings()
            changed = [f"{name} to {now} (now {before[name]})" for name, now in settings.items() if now != before[name]]
            return f"Set {change.name} {', '.join(changed)}"
    defaults = {field.name: field.default for field in fields(change)}  # type: ignore[arg-type]
    telling = [f"{n}={v}" for n, v in settings.items() if len(settings) == 1 or v != defaults[n]]
    return f"Turn on {change.name}" + (f" with {', '.join(telling)}" if telling else "")
