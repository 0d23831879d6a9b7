"""`plan(…)`: the smallest sets of changes with which a fine-tuning run fits a budget, found by predictions alone.

No technique is known here by name. Each says itself which settings are worth trying (`Technique.variants`) and which
categories of memory it attacks. A prediction takes a second or two, so the search looks at few sets: first each
technique alone with the settings that save most, then those sets again that came closest, each extended by the
techniques that attack what dominates their peak. A set that fits is never extended; of each of its techniques the
gentlest settings are taken that still fit, and a technique without which it fits too is dropped.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tqdm import tqdm

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.measure.categories import Category, format_bytes, parse_bytes
from workbench.predict import predict as prediction
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Numerics, Technique

NUMERICS = tuple(Numerics)  # from the best to the worst
ALWAYS_REMOVABLE = (Category.TEMPORARIES, Category.UNATTRIBUTED)  # shrink along with whatever else shrinks
SETS, EXTENSIONS = 3, 5  # how many sets of each kind of numerics are extended, and by how many techniques
WORTHWHILE = 0.05  # a technique that attacks less than this part of the peak is not added to a set


class PredictedMemory(Protocol):
    """What the planner reads of a prediction. `peak_reserved_bytes` is None where nothing caches, on a CPU."""

    @property
    def peak_allocated_bytes(self) -> int: ...
    @property
    def peak_reserved_bytes(self) -> int | None: ...
    @property
    def context_bytes(self) -> int: ...
    @property
    def by_category(self) -> Mapping[str, int]: ...
    @property
    def flops(self) -> int: ...


Predictor = Callable[[Recipe], PredictedMemory]


@dataclass(frozen=True)
class Candidate:
    """One set of changes and what it is predicted to need.

    `needed_bytes` is everything the device must give: what the allocator reserves, and the context. Cached memory that
    PyTorch would give back near the limit counts as needed, so the answer errs on the safe side. `extra_compute` is
    the floating-point operations of the whole run relative to those without the changes: 0.33 is a third more.
    """

    recipe: Recipe
    changes: tuple[Technique, ...]
    forecast: PredictedMemory
    budget_bytes: int
    extra_compute: float

    @property
    def needed_bytes(self) -> int:
        return (self.forecast.peak_reserved_bytes or self.forecast.peak_allocated_bytes) + self.forecast.context_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.budget_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

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
    def dominant(self) -> tuple[str, int]:
        """The largest category at the peak."""
        return max(self.forecast.by_category.items(), key=lambda entry: entry[1])

    def row(self) -> dict[str, Any]:
        """For `plots.memory_bars`: the columns that a record's row has too."""
        parts = {f"{category}_bytes": size for category, size in self.forecast.by_category.items()}
        peak = self.forecast.peak_allocated_bytes
        return {"label": self.label, "memory_source": "predicted", "peak_allocated_bytes": peak, **parts}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "label": self.label,
            "recipe": self.recipe.to_dict(),
            "changes": {change.name: change.settings() for change in self.changes},
            "numerics": str(self.numerics),
            "needed_bytes": self.needed_bytes,
            "headroom_bytes": self.headroom_bytes,
            "fits": self.fits,
            "peak_allocated_bytes": self.forecast.peak_allocated_bytes,
            "peak_reserved_bytes": self.forecast.peak_reserved_bytes,
            "context_bytes": self.forecast.context_bytes,
            "by_category": dict(self.forecast.by_category),
            "extra_compute": self.extra_compute,
            "gives_up": list(self.gives_up),
            "command": self.recipe.command(),
        }


@dataclass(frozen=True)
class Planned:
    """What a search found. `candidates` fit, the best first; `tried` is every set that was predicted, in that order."""

    budget_bytes: int
    predicted_for: str
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # what could not be predicted, and why

    @property
    def closest(self) -> Candidate:
        """That which needs least of all that were tried."""
        return min(self.tried, key=lambda candidate: candidate.needed_bytes)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> Candidate:
        return self.candidates[index]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "budget_bytes": self.budget_bytes,
            "predicted_for": self.predicted_for,
            "baseline": self.baseline.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "closest": self.closest.to_dict(),
            "predictions": len(self.tried),
            "skipped": dict(self.skipped),
        }


def plan(
    *,
    budget: str | int | None = None,
    gpu: str = "h100",
    among: Iterable[str] | None = None,
    most_changes: int = 4,
    predict: Callable[[Recipe, str], PredictedMemory] | None = None,
    **fields: Any,
) -> Planned:
    """The smallest sets of changes with which a recipe fits, the best first: exact ones, then those that compute less.

        plan(model="gpt2", budget="8GiB", effective_batch_size=8, sequence_length=1024)

    Args:
        budget: what the device has, `"8GiB"` or a number of bytes; by default the memory of `gpu`.
        gpu: whose kernels and workspaces are predicted, or `"cpu"` for this machine's own.
        among: names of the techniques to choose from; by default all there are.
        most_changes: how many techniques one candidate may have.
        predict: another predictor than `workbench.predict`.
        fields: those of `Recipe`; techniques among them stay switched on.

    Raises:
        ConfigurationError: an unclear budget, or one below the weights; an unknown GPU; a recipe that cannot be used.
    """
    row = None if gpu == prediction.CPU else find_gpu(gpu)
    if budget is None and row is None:
        raise ConfigurationError("budget: a CPU has none of its own. Give one, as in budget='2GiB'.")
    budget_bytes = row.memory_bytes if budget is None and row else parse_bytes(budget or 0, "budget")
    recipe = Recipe.from_dict({**fields, "techniques": {}})
    recipe = replace(recipe, techniques=tuple(fields.get("techniques", ())))
    ask: Callable[[Recipe, str], PredictedMemory] = predict or prediction.predict
    return search(
        prediction.resolved(recipe, [gpu]),
        budget_bytes,
        lambda wanted: ask(wanted, gpu),
        families=choose_families(families(row.compute_capability if row else None), among),
        predicted_for=row.title if row else "this machine's CPU",
        most_changes=most_changes,
    )


def families(compute_capability: tuple[int, int] | None) -> dict[str, tuple[Technique, ...]]:
    """Of every registered technique what a planner should try on such a GPU; None is a CPU."""
    return {name: technique.variants(compute_capability) for name, technique in sorted(REGISTRY.items())}


def choose_families(
    offered: dict[str, tuple[Technique, ...]], among: Iterable[str] | None
) -> dict[str, tuple[Technique, ...]]:
    """Some of the families by name; all if `among` is None. Raises ConfigurationError for an unknown name."""
    names = tuple(offered if among is None else among)
    if unknown := [name for name in names if name not in offered]:
        raise ConfigurationError(f"among: there is no technique {unknown[0]!r}. Known: {', '.join(offered)}.")
    return {name: offered[name] for name in names}


def search(
    recipe: Recipe,
    budget_bytes: int,
    predict: Predictor,
    *,
    families: Mapping[str, tuple[Technique, ...]],
    predicted_for: str = "",
    most_changes: int = 4,
) -> Planned:
    """The search itself, with any predictor.

    Args:
        recipe: what to fit; techniques that it has already stay in every candidate.
        families: of each technique the settings to try, from the one that gives up least to the one that saves most.

    Raises:
        ConfigurationError: the budget is below the weights, whatever is tried on them.
    """
    return _Search(recipe, budget_bytes, predict, families, most_changes).run(predicted_for)


class _Search:
    def __init__(
        self,
        recipe: Recipe,
        budget_bytes: int,
        predict: Predictor,
        families: Mapping[str, tuple[Technique, ...]],
        most_changes: int,
    ) -> None:
        self.recipe, self.budget_bytes, self.predict, self.most_changes = recipe, budget_bytes, predict, most_changes
        possible = {name: tuple(filter(self._possible, family)) for name, family in families.items()}
        self.families = {name: family for name, family in possible.items() if family and family[-1].attacks}
        self.known: dict[tuple[Technique, ...], Candidate | None] = {}
        self.skipped: dict[str, str] = {}
        self.compute = 0.0
        quiet = not (sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ)
        self.bar = tqdm(desc="predicting", unit=" recipes", disable=quiet, leave=False)

    def _possible(self, change: Technique) -> bool:
        """Some settings do not suit the recipe: a batch that cannot be split so often, a technique it has already."""
        try:
            return bool(self.recipe | change)
        except ConfigurationError:
            return False

    def run(self, predicted_for: str) -> Planned:
        baseline = self._baseline()
        self._refuse_less_than_the_weights(baseline)
        found = [] if baseline.fits else self._levels(baseline)
        self.bar.close()
        return Planned(
            budget_bytes=self.budget_bytes,
            predicted_for=predicted_for,
            baseline=baseline,
            candidates=(baseline,) if baseline.fits else tuple(sorted(found, key=rank)),
            tried=tuple(candidate for candidate in self.known.values() if candidate),
            skipped=self.skipped,
        )

    def _baseline(self) -> Candidate:
        forecast = self.predict(self.recipe)
        self.compute = whole_run(self.recipe, forecast)
        baseline = Candidate(self.recipe, (), forecast, self.budget_bytes, 0.0)
        self.known[()] = baseline
        return baseline

    def _refuse_less_than_the_weights(self, baseline: Candidate) -> None:
        """A technique may make the weights smaller; only if none makes them small enough is the budget refused."""
        sizes = [baseline.forecast.by_category.get(Category.WEIGHTS, 0)]
        if sizes[0] <= self.budget_bytes:
            return
        for family in self.families.values():
            if Category.WEIGHTS in family[-1].attacks and (tried := self._try((family[-1],))):
                sizes.append(tried.forecast.by_category.get(Category.WEIGHTS, 0))
        if min(sizes) > self.budget_bytes:
            raise ConfigurationError(
                f"budget: {format_bytes(self.budget_bytes)} is below the weights of {self.recipe.model} alone, "
                f"{format_bytes(sizes[0])}; the least that a technique makes of them is {format_bytes(min(sizes))}. "
                "Choose a smaller model or a larger budget."
            )

    def _levels(self, baseline: Candidate) -> list[Candidate]:
        """Sets of one change, of two, and so on. Once something fits, only sets that alter the loss less are
        extended, and none once a set with the same loss fits."""
        found: list[Candidate] = []
        frontier = [baseline]
        for _ in range(self.most_changes):
            reached = self._extend(frontier, found)
            found = _without_supersets([*found, *(self._relaxed(c) for c in reached if c.fits)])
            open_sets = sorted((c for c in reached if not c.fits), key=lambda c: c.needed_bytes)
            better = NUMERICS[: _best(found)]
            frontier = [c for kind in better for c in [s for s in open_sets if s.numerics is kind][:SETS]]
        return found

    def _extend(self, frontier: list[Candidate], found: list[Candidate]) -> list[Candidate]:
        """Every set of the frontier with one more technique, where that makes it smaller."""
        reached: dict[frozenset[str], Candidate] = {}
        for start in frontier:
            for family in self._promising(start, found):
                changes = tuple(sorted((*start.changes, family[-1]), key=lambda change: change.name))
                names = frozenset(change.name for change in changes)
                if names in reached or any(_names(candidate) <= names for candidate in found):
                    continue
                tried = self._try(changes)
                if tried and tried.needed_bytes < start.needed_bytes:
                    reached[names] = tried
        return list(reached.values())

    def _promising(self, start: Candidate, found: list[Candidate]) -> list[tuple[Technique, ...]]:
        """The techniques to add, first those that attack most of what is there at the peak.

        Alone all are tried, since some act on more than they attack.
        """
        families = [family for name, family in self.families.items() if name not in _names(start)]
        families = [family for family in families if NUMERICS.index(family[-1].numerics) < _best(found)]

        def attacked(family: tuple[Technique, ...]) -> int:
            categories = {*family[-1].attacks, *ALWAYS_REMOVABLE}
            return sum(start.forecast.by_category.get(category, 0) for category in categories)

        if not start.changes:
            return families
        least = WORTHWHILE * sum(start.forecast.by_category.values())
        return sorted((f for f in families if attacked(f) >= least), key=attacked, reverse=True)[:EXTENSIONS]

    def _relaxed(self, candidate: Candidate) -> Candidate:
        """The same techniques, none of them needlessly, each with the gentlest settings that still fit."""
        for change in candidate.changes:
            without = self._try(tuple(other for other in candidate.changes if other is not change))
            if without and without.fits:
                return self._relaxed(without)
        for change in sorted(candidate.changes, key=self._cost_alone, reverse=True):
            candidate = self._gentlest(candidate, change)
        return candidate

    def _cost_alone(self, change: Technique) -> float:
        alone = self.known.get((change,))
        return alone.extra_compute if alone else 0.0

    def _gentlest(self, candidate: Candidate, change: Technique) -> Candidate:
        """Bisect one technique's settings; the last of them is known to fit."""
        family = self.families[change.name]
        low, high = 0, len(family) - 1
        while low < high:
            middle = (low + high) // 2
            tried = self._try(tuple(family[middle] if c.name == change.name else c for c in candidate.changes))
            if tried and tried.fits:
                candidate, high = tried, middle
            else:
                low = middle + 1
        return candidate

    def _try(self, changes: tuple[Technique, ...]) -> Candidate | None:
        """Predict once; None where the techniques exclude each other, do not suit the batch, or cannot be predicted."""
        if changes not in self.known:
            self.known[changes] = self._predicted(changes)
        return self.known[changes]

    def _predicted(self, changes: tuple[Technique, ...]) -> Candidate | None:
        try:
            recipe = replace(self.recipe, techniques=(*self.recipe.techniques, *changes))
        except ConfigurationError:
            return None  # a set that nobody can ask for is no news
        try:
            forecast = self.predict(recipe)
        except ConfigurationError as error:
            self.skipped[replace(recipe, techniques=changes).label] = str(error)
            return None
        self.bar.update()
        extra = whole_run(recipe, forecast) / self.compute - 1 if self.compute else 0.0
        return Candidate(recipe, changes, forecast, self.budget_bytes, extra)


def whole_run(recipe: Recipe, forecast: PredictedMemory) -> float:
    """Floating-point operations of all steps: a technique may change how many there are."""
    return float(forecast.flops) * float(recipe.training_arguments()["max_steps"])


def _best(found: list[Candidate]) -> int:
    """The best numerics that fit so far, as a rank; beyond the last rank if nothing does."""
    return min((NUMERICS.index(candidate.numerics) for candidate in found), default=len(NUMERICS))


def _names(candidate: Candidate) -> frozenset[str]:
    return frozenset(change.name for change in candidate.changes)


def _without_supersets(candidates: list[Candidate]) -> list[Candidate]:
    distinct = {_names(candidate): candidate for candidate in candidates}
    return [candidate for names, candidate in distinct.items() if not any(other < names for other in distinct)]


def rank(candidate: Candidate) -> tuple[int, float, int, int]:
    """Exact before approximate before different; then less compute (to the per mille), fewer changes, less memory."""
    order = NUMERICS.index(candidate.numerics)
    return (order, round(candidate.extra_compute, 3), len(candidate.changes), candidate.needed_bytes)


def plan_text(planned: Planned) -> str:
    """The plan as people read it."""
    lines = [
        f"budget {format_bytes(planned.budget_bytes)}, predicted for {planned.predicted_for} "
        f"({len(planned.tried)} predictions)",
        f"as it is: {_needs(planned.baseline)}",
    ]
    if planned.baseline.fits:
        lines += ["", "It fits without any change:", f"  {planned.baseline.recipe.command()}"]
    elif planned.candidates:
        for number, candidate in enumerate(planned.candidates, start=1):
            lines += ["", *_entry(number, candidate)]
    else:
        category, size = planned.closest.dominant
        lines += [
            "",
            f"Nothing was found that fits. Closest: {planned.closest.label}",
            f"   {_needs(planned.closest)}; {category.replace('_', ' ')} dominate with {format_bytes(size)}.",
            "   Choose a larger budget, a smaller model, or a smaller batch or sequence.",
        ]
    lines += [f"\nnot predicted: {label}: {reason}" for label, reason in planned.skipped.items()]
    return "\n".join(lines)


def _needs(candidate: Candidate) -> str:
    room = format_bytes(abs(candidate.headroom_bytes))
    return f"needs {format_bytes(candidate.needed_bytes)}, {room} {'to spare' if candidate.fits else 'too much'}"


def _entry(number: int, candidate: Candidate) -> list[str]:
    return [
        f"{number}. {candidate.label}",
        f"   {_needs(candidate)}; loss {candidate.numerics}; {candidate.extra_compute:+.0%} compute",
        *(f"   gives up  {text}" for text in candidate.gives_up),
        f"   {candidate.recipe.command()}",
    ]
