"""`plan(…)`: the smallest sets of changes with which a fine-tuning run fits a budget, found by predictions alone.

No technique is known here by name. Each says itself which settings are worth trying (`Technique.variants`) and which
categories of memory it attacks. A prediction takes a second or two, so the search tries few sets. First it tries each
technique alone, with the settings that save most. Then it extends the sets that came closest by the techniques that
attack what dominates their peak. A set that fits is never extended. Each of its techniques gets the gentlest settings
that still fit, and a technique without which it fits too is dropped.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.advise.candidate import NUMERICS, Candidate, Predictor, entry, rank
from workbench.base.bar import progress_bar
from workbench.base.categories import Category, format_bytes, parse_bytes
from workbench.base.errors import ConfigurationError
from workbench.base.result import Result
from workbench.base.settings import unknown_name_error
from workbench.gpus.catalogue import GPUS, device_name, room_bytes
from workbench.prediction import predict as prediction
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Technique

THIS_CPU = "this machine's CPU"
# The settings to try, the gentlest first, by the name of their technique.
Families = Mapping[str, tuple[Technique, ...]]
# Categories that shrink along with whatever else shrinks.
ALWAYS_REMOVABLE = (Category.TEMPORARIES, Category.UNATTRIBUTED)
SETS = 3  # sets that are extended at once, for each kind of numerics: those that need least
EXTENSIONS = 5  # techniques by which a set is extended, at most
WORTHWHILE = 0.05  # part of the peak: a technique that attacks less is not added to a set


@dataclass(frozen=True)
class Plan(Result):
    """The result of a search.

    Attributes:
        baseline: the recipe without changes.
        candidates: the sets of changes that fit, the best first.
        tried: all sets that were predicted, in that order, beginning with the baseline.
        skipped: the reasons why sets could not be predicted, by their label.
        predicted_for: the device of the predictions, for people.
        asked_bytes: the budget that was asked for, of which the device may have less; None if none was.
    """

    budget_bytes: int
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    skipped: Mapping[str, str]
    predicted_for: str = ""
    asked_bytes: int | None = None
    json_fields = (
        "budget_bytes",
        "predicted_for",
        "baseline",
        "closest",
        "candidates",
        "predictions",
        "skipped",
    )

    @property
    def predictions(self) -> int:
        """The number of predictions that the search made."""
        return len(self.tried)

    @property
    def closest(self) -> Candidate:
        """The set that needs least of all that were tried."""
        return min(self.tried, key=lambda candidate: candidate.needed_bytes)

    def __getitem__(self, index: int) -> Candidate:
        return self.candidates[index]

    def __str__(self) -> str:
        budget = format_bytes(self.budget_bytes)
        if self.asked_bytes and self.asked_bytes > self.budget_bytes:
            budget += f" (all there is, less than the {format_bytes(self.asked_bytes)} asked for)"
        lines = [
            f"budget {budget}, predicted for {self.predicted_for} ({self.predictions} predictions)",
            f"as it is: needs {format_bytes(self.baseline.needed_bytes)}, {self.baseline.room}",
        ]
        if self.baseline.fits:
            lines += ["", "It fits without any change:", f"  {self.baseline.command}"]
        elif self.candidates:
            for number, candidate in enumerate(self.candidates, start=1):
                title = f"{number}. {candidate.words}"
                lines += ["", *entry(candidate, title, candidate.room)]
        else:
            closest = self.closest
            category, size = closest.dominant
            lines += [
                "",
                f"Nothing was found that fits. Closest: {closest.words or 'no change'}",
                f"   needs {format_bytes(closest.needed_bytes)}, {closest.room}; "
                f"{category.replace('_', ' ')} dominate with {format_bytes(size)}.",
                "   Choose a larger budget, a smaller model, or a smaller batch or sequence.",
            ]
        for label, reason in self.skipped.items():
            lines.append(f"\nnot predicted: {label}: {reason}")
        return "\n".join(lines)


def plan(
    *,
    budget: str | int | None = None,
    gpu: str = "h100",
    among: Iterable[str] | None = None,
    most_changes: int = 4,
    predict: Predictor | None = None,
    **fields: Any,
) -> Plan:
    """Find the smallest sets of changes with which a recipe fits, the best first: exact ones, then faster ones.

        plan(model="gpt2", budget="8GiB", effective_batch_size=8, sequence_length=1024)

    Args:
        budget: the memory for all that the run needs of the device, CUDA's context included, as `"8GiB"` or a number of
            bytes; by default, and at most, the memory of `gpu`.
        gpu: the GPU whose kernels and workspaces are predicted, or `"cpu"` for this machine's own.
        among: names of the techniques to choose from; by default all there are.
        most_changes: how many techniques one candidate may have.
        predict: a predictor in the place of `workbench.predict`.
        fields: the fields of `Recipe`; techniques among them stay switched on.

    Raises:
        ConfigurationError: the budget is unclear, or below the weights; the GPU is unknown; or the recipe cannot be
            used.
    """
    gpu = device_name(gpu)
    card = GPUS.get(gpu)
    if budget is None and card is None:
        raise ConfigurationError("budget: a CPU has none of its own. Give one, as in budget='2GiB'.")
    asked_bytes = None if budget is None else parse_bytes(budget, "budget")
    budget_bytes = room_bytes(gpu, asked_bytes)
    recipe = Recipe.from_dict({**fields, "techniques": {}})
    recipe = replace(recipe, techniques=tuple(fields.get("techniques", ())))

    def predict_on_gpu(recipe: Recipe) -> Prediction:
        return (predict or prediction.predict)(recipe, gpu)

    search = Search(
        prediction.resolve_model(recipe, [gpu]),
        budget_bytes,
        predict_on_gpu,
        families(card.compute_capability if card else None, among),
        most_changes=most_changes,
    )
    return replace(search.plan(), predicted_for=card.title if card else THIS_CPU, asked_bytes=asked_bytes)


def families(compute_capability: tuple[int, int] | None, among: Iterable[str] | None = None) -> Families:
    """Return the settings to try on a GPU, by the name of their technique.

    Args:
        compute_capability: the GPU's; None is a CPU.
        among: names of techniques; by default all there are.

    Raises:
        ConfigurationError: no technique has one of these names.
    """
    offered = {}
    for name in sorted(REGISTRY) if among is None else among:
        if name not in REGISTRY:
            raise unknown_name_error("among: there is no technique", name, sorted(REGISTRY))
        offered[name] = REGISTRY[name].variants(compute_capability)
    return offered


@dataclass
class Search:
    """The search itself, with any predictor.

    Args:
        recipe: the recipe that must fit; techniques that it has already stay in every candidate.
        families: the settings to try, by the name of their technique, from the gentlest to the one that saves most.
        replacing: whether other settings of techniques that the recipe has already are changes, too.

    Attributes:
        tried: the candidate of each set of changes; None where the set could not be predicted.
        skipped: the reasons why sets could not be predicted, by their label.
    """

    recipe: Recipe
    budget_bytes: int
    predict: Callable[[Recipe], Prediction]
    families: Families
    most_changes: int = 4
    replacing: bool = False

    def __post_init__(self) -> None:
        offered = {}
        for name, family in self.families.items():
            possible = tuple(change for change in family if self._with((change,)))
            if possible and possible[-1].attacks:
                offered[name] = possible
        self.families = offered
        self.baseline = Candidate(self.recipe, (), self.predict(self.recipe), self.budget_bytes)
        self.tried: dict[tuple[Technique, ...], Candidate | None] = {(): self.baseline}
        self.skipped: dict[str, str] = {}
        self.bar = progress_bar(desc="predicting", unit=" recipes")

    def plan(self) -> Plan:
        """Search. Raises ConfigurationError: the budget is below the weights, whatever is tried on them."""
        with self.bar:
            self._refuse_less_than_the_weights()
            candidates = [self.baseline] if self.baseline.fits else sorted(self._levels(), key=rank)
        return Plan(
            self.budget_bytes,
            self.baseline,
            candidates=tuple(candidates),
            tried=tuple(filter(None, self.tried.values())),
            skipped=self.skipped,
        )

    def _refuse_less_than_the_weights(self) -> None:
        """Refuse a budget below the weights, unless a technique makes them small enough."""
        weights = _weights(self.baseline)
        least = weights
        for family in self.families.values():
            if least > self.budget_bytes and Category.WEIGHTS in family[-1].attacks:
                smaller = self._try((family[-1],))
                least = min(least, _weights(smaller) if smaller else least)
        if least > self.budget_bytes:
            raise ConfigurationError(
                f"budget: {format_bytes(self.budget_bytes)} is below the weights of "
                f"{self.recipe.model} alone, {format_bytes(weights)}; "
                f"the least that a technique makes of them is {format_bytes(least)}. "
                "Choose a smaller model or a larger budget."
            )

    def _levels(self) -> list[Candidate]:
        """Return the sets that fit: first try those of one change, then of two, and so on.

        Once something fits, only sets that alter the loss less are extended, and none once a set with the same loss
        fits.
        """
        fitting: list[Candidate] = []
        frontier = [self.baseline]
        for _ in range(self.most_changes):
            too_large = []
            for candidate in self._extend(frontier, fitting):
                if candidate.fits:
                    fitting.append(self._relax(candidate))
                else:
                    too_large.append(candidate)
            fitting = _without_supersets(fitting)
            too_large.sort(key=lambda candidate: candidate.needed_bytes)
            frontier = []
            for numerics in NUMERICS[: _best_rank(fitting)]:  # numerics better than of any set that fits
                frontier += [candidate for candidate in too_large if candidate.numerics is numerics][:SETS]
        return fitting

    def _extend(self, frontier: list[Candidate], fitting: list[Candidate]) -> list[Candidate]:
        """Return every set of the frontier with one more technique, where that makes it smaller."""
        reached: dict[frozenset[str], Candidate] = {}
        for start in frontier:
            for family in self._promising(start, fitting):
                changes = tuple(sorted((*start.changes, family[-1]), key=lambda change: change.name))
                names = frozenset(change.name for change in changes)
                if names in reached or any(candidate.names <= names for candidate in fitting):
                    continue
                candidate = self._try(changes)
                if candidate and candidate.needed_bytes < start.needed_bytes:
                    reached[names] = candidate
        return list(reached.values())

    def _promising(self, start: Candidate, fitting: list[Candidate]) -> list[tuple[Technique, ...]]:
        """Return the techniques to add to a set, first those that attack most of its peak.

        Alone all are tried, since some act on more than they attack. A technique that could not be predicted alone is
        not tried again.
        """
        attacked = {}
        for name, family in self.families.items():
            is_possible = self.tried.get((family[-1],), self.baseline) is not None
            alters_less = NUMERICS.index(family[0].numerics) < _best_rank(fitting)
            if is_possible and alters_less and name not in start.names:
                attacked[family] = attackable_bytes(family[-1], start.predicted)
        if not start.changes:
            return list(attacked)
        least = WORTHWHILE * sum(start.predicted.by_category.values())
        worthwhile = [family for family in attacked if attacked[family] >= least]
        return sorted(worthwhile, key=attacked.__getitem__, reverse=True)[:EXTENSIONS]

    def _relax(self, candidate: Candidate) -> Candidate:
        """Drop the techniques that are not needed, and give each other one the gentlest settings that still fit."""
        for change in candidate.changes:
            without = self._try(tuple(other for other in candidate.changes if other is not change))
            if without and without.fits:
                return self._relax(without)
        for change in sorted(candidate.changes, key=self._cost_alone, reverse=True):
            candidate = self._gentlest(candidate, change.name)
        return candidate

    def _cost_alone(self, change: Technique) -> float:
        """Return the additional time of a technique alone; 0 if it was not predicted alone."""
        alone = self.tried.get((change,))
        return alone.extra_time if alone else 0.0

    def _gentlest(self, candidate: Candidate, name: str) -> Candidate:
        """Bisect the settings of one technique, the last of which are known to fit."""

        changes = {change.name: change for change in candidate.changes}

        def try_setting(setting: Technique) -> Candidate | None:
            return self._try(tuple({**changes, name: setting}.values()))

        def fits(setting: Technique) -> bool:
            gentler = try_setting(setting)
            return gentler is not None and gentler.fits

        family = self.families[name]
        return try_setting(family[bisect_left(family[:-1], True, key=fits)]) or candidate

    def _try(self, changes: tuple[Technique, ...]) -> Candidate | None:
        """Predict a set of changes, once.

        None means that its techniques exclude each other, do not suit the batch, or cannot be predicted.
        """
        if changes in self.tried:
            return self.tried[changes]
        self.tried[changes] = None
        recipe = self._with(changes)
        if recipe is None:  # without a recipe there is nothing to report
            return None
        try:
            predicted = self.predict(recipe)
        except ConfigurationError as error:
            self.skipped[replace(recipe, techniques=changes).label] = str(error)
            return None
        self.bar.update()
        self.tried[changes] = Candidate(recipe, changes, predicted, self.budget_bytes, self.baseline)
        return self.tried[changes]

    def _with(self, changes: tuple[Technique, ...]) -> Recipe | None:
        """Return the recipe with these changes.

        None means that there is no such recipe, as where a batch cannot be split so often, or that it is the same.
        """
        techniques = (*self.recipe.techniques, *changes)
        if self.replacing:  # a change replaces the technique of its name
            techniques = tuple({technique.name: technique for technique in techniques}.values())
        try:
            recipe = replace(self.recipe, techniques=techniques)
        except ConfigurationError:
            return None
        return recipe if recipe != self.recipe else None


def attackable_bytes(change: Technique, predicted: Prediction) -> int:
    """Return the bytes at the peak that a technique may make fewer."""
    return sum(predicted.by_category.get(category, 0) for category in {*change.attacks, *ALWAYS_REMOVABLE})


def _weights(candidate: Candidate) -> int:
    return candidate.predicted.by_category.get(Category.WEIGHTS, 0)


def _best_rank(fitting: list[Candidate]) -> int:
    """Return the best numerics that fit so far, as an index of NUMERICS; one beyond the last if nothing fits."""
    return min((NUMERICS.index(candidate.numerics) for candidate in fitting), default=len(NUMERICS))


def _without_supersets(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates of which no part fits alone. Of several with the same techniques the last one stays."""
    smallest = {}
    for candidate in candidates:
        if not any(other.names < candidate.names for other in candidates):
            smallest[candidate.names] = candidate
    return list(smallest.values())
