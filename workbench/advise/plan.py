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
from threading import current_thread, main_thread
from typing import Any

from tqdm import tqdm

from workbench.advise.candidate import NUMERICS, Candidate, Predictor, entry, rank
from workbench.advise.cards import cards_text, on_two_cards
from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.measure.categories import Category, format_bytes, parse_bytes
from workbench.predict import predict as prediction
from workbench.predict.prediction import Prediction
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Technique

THIS_CPU = "this machine's CPU"
ALWAYS_REMOVABLE = (Category.TEMPORARIES, Category.UNATTRIBUTED)  # shrink along with whatever else shrinks
SETS = 3  # of each kind of numerics that are extended
EXTENSIONS = 5  # techniques by which a set is extended
WORTHWHILE = 0.05  # a technique that attacks less than this part of the peak is not added to a set


@dataclass(frozen=True)
class Plan:
    """What a search found. `candidates` fit, the best first; `tried` is every set that was predicted, in that order."""

    budget_bytes: int
    predicted_for: str
    baseline: Candidate
    candidates: tuple[Candidate, ...]
    tried: tuple[Candidate, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)  # what could not be predicted, and why
    on_cards: tuple[Candidate, ...] = ()  # where it does not fit as it is: a rank of it on two cards

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

    def __str__(self) -> str:
        lines = [
            f"budget {format_bytes(self.budget_bytes)}, predicted for {self.predicted_for} "
            f"({len(self.tried)} predictions)",
            f"as it is: needs {format_bytes(self.baseline.needed_bytes)}, {_room(self.baseline)}",
        ]
        if self.baseline.fits:
            lines += ["", "It fits without any change:", f"  {self.baseline.command}"]
        elif self.candidates:
            for number, candidate in enumerate(self.candidates, start=1):
                title = f"{number}. {candidate.label}"
                lines += ["", *entry(candidate, title, _room(candidate), candidate.gives_up)]
        else:
            category, size = self.closest.dominant
            lines += [
                "",
                f"Nothing was found that fits. Closest: {self.closest.label}",
                f"   needs {format_bytes(self.closest.needed_bytes)}, {_room(self.closest)}; "
                f"{category.replace('_', ' ')} dominate with {format_bytes(size)}.",
                "   Choose a larger budget, a smaller model, or a smaller batch or sequence.",
            ]
        lines += cards_text(self.on_cards)
        lines += [f"\nnot predicted: {label}: {reason}" for label, reason in self.skipped.items()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "budget_bytes": self.budget_bytes,
            "predicted_for": self.predicted_for,
            "baseline": self.baseline.to_dict(),
            "closest": self.closest.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "predictions": len(self.tried),
            "skipped": dict(self.skipped),
            "on_two_cards": [candidate.to_dict() for candidate in self.on_cards],
        }


def plan(
    *,
    budget: str | int | None = None,
    gpu: str = "h100",
    among: Iterable[str] | None = None,
    most_changes: int = 4,
    predict: Predictor | None = None,
    **fields: Any,
) -> Plan:
    """The smallest sets of changes with which a recipe fits, the best first: exact ones, then those that are faster.

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
    card = None if gpu == prediction.CPU else find_gpu(gpu)
    if budget is not None:
        budget_bytes = parse_bytes(budget, "budget")
    elif card is not None:
        budget_bytes = card.memory_bytes
    else:
        raise ConfigurationError("budget: a CPU has none of its own. Give one, as in budget='2GiB'.")
    recipe = Recipe.from_dict({**fields, "techniques": {}})
    recipe = replace(recipe, techniques=tuple(fields.get("techniques", ())))
    ask: Predictor = predict or prediction.predict
    searched = Search(
        prediction.resolved(recipe, [gpu]),
        budget_bytes,
        lambda wanted: ask(wanted, gpu),
        families=families(card.compute_capability if card else None, among),
        predicted_for=card.title if card else THIS_CPU,
        most_changes=most_changes,
    ).plan()
    if card is None or predict or searched.baseline.fits:
        return searched
    return replace(searched, on_cards=on_two_cards(searched.baseline.recipe, gpu, budget_bytes))


def families(
    compute_capability: tuple[int, int] | None, among: Iterable[str] | None = None
) -> dict[str, tuple[Technique, ...]]:
    """Of each technique in `among`, or of all, the settings to try on such a GPU; None is a CPU.

    Raises:
        ConfigurationError: no technique has that name.
    """
    names = sorted(REGISTRY) if among is None else tuple(among)
    for name in names:
        if name not in REGISTRY:
            raise ConfigurationError(f"among: there is no technique {name!r}. Known: {', '.join(sorted(REGISTRY))}.")
    return {name: REGISTRY[name].variants(compute_capability) for name in names}


@dataclass
class Search:
    """The search itself, with any predictor.

    Args:
        recipe: what to fit; techniques that it has already stay in every candidate.
        families: of each technique the settings to try, from the one that gives up least to the one that saves most.
        compared_with: what the candidates save and cost is against this; by default against `recipe`.
    """

    recipe: Recipe
    budget_bytes: int
    predict: Callable[[Recipe], Prediction]
    families: Mapping[str, tuple[Technique, ...]]
    predicted_for: str = ""
    most_changes: int = 4
    compared_with: Candidate | None = None

    def __post_init__(self) -> None:
        possible = {name: tuple(filter(self._possible, family)) for name, family in self.families.items()}
        self.families = {name: family for name, family in possible.items() if family and family[-1].attacks}
        self.baseline = Candidate(self.recipe, (), self.predict(self.recipe), self.budget_bytes, self.compared_with)
        self.known: dict[tuple[Technique, ...], Candidate | None] = {(): self.baseline}
        self.skipped: dict[str, str] = {}
        aside = current_thread() is not main_thread()  # of a panel, which has words of its own
        quiet = aside or not (sys.stderr.isatty() or "JPY_SESSION_NAME" in os.environ)
        self.bar = tqdm(desc="predicting", unit=" recipes", disable=quiet, leave=False)

    def plan(self) -> Plan:
        """Raises ConfigurationError: the budget is below the weights, whatever is tried on them."""
        with self.bar:
            self._refuse_less_than_the_weights()
            candidates = [self.baseline] if self.baseline.fits else sorted(self._levels(), key=rank)
        return Plan(
            budget_bytes=self.budget_bytes,
            predicted_for=self.predicted_for,
            baseline=self.baseline,
            candidates=tuple(candidates),
            tried=tuple(candidate for candidate in self.known.values() if candidate),
            skipped=self.skipped,
        )

    def _possible(self, change: Technique) -> bool:
        """Some settings do not suit the recipe: a batch that cannot be split so often, a technique it has already."""
        try:
            return bool(self.recipe | change)
        except ConfigurationError:
            return False

    def _refuse_less_than_the_weights(self) -> None:
        """A technique may make the weights smaller; only if none makes them small enough is the budget refused."""
        sizes = [self.baseline.predicted.by_category.get(Category.WEIGHTS, 0)]
        if sizes[0] <= self.budget_bytes:
            return
        for family in self.families.values():
            tried = self._try((family[-1],)) if Category.WEIGHTS in family[-1].attacks else None
            if tried:
                sizes.append(tried.predicted.by_category.get(Category.WEIGHTS, 0))
        if min(sizes) > self.budget_bytes:
            raise ConfigurationError(
                f"budget: {format_bytes(self.budget_bytes)} is below the weights of {self.recipe.model} alone, "
                f"{format_bytes(sizes[0])}; the least that a technique makes of them is {format_bytes(min(sizes))}. "
                "Choose a smaller model or a larger budget."
            )

    def _levels(self) -> list[Candidate]:
        """Sets of one change, of two, and so on. Once something fits, only sets that alter the loss less are
        extended, and none once a set with the same loss fits."""
        fitting: list[Candidate] = []
        frontier = [self.baseline]
        for _ in range(self.most_changes):
            reached = self._extend(frontier, fitting)
            fitting = _without_supersets([*fitting, *(self._relaxed(c) for c in reached if c.fits)])
            too_large = sorted((c for c in reached if not c.fits), key=lambda c: c.needed_bytes)
            frontier = []
            for numerics in NUMERICS[: _best(fitting)]:
                closest = [candidate for candidate in too_large if candidate.numerics is numerics]
                frontier += closest[:SETS]
        return fitting

    def _extend(self, frontier: list[Candidate], fitting: list[Candidate]) -> list[Candidate]:
        """Every set of the frontier with one more technique, where that makes it smaller."""
        reached: dict[frozenset[str], Candidate] = {}
        for start in frontier:
            for family in self._promising(start, fitting):
                changes = tuple(sorted((*start.changes, family[-1]), key=lambda change: change.name))
                names = frozenset(change.name for change in changes)
                if names in reached or any(candidate.names <= names for candidate in fitting):
                    continue
                tried = self._try(changes)
                if tried and tried.needed_bytes < start.needed_bytes:
                    reached[names] = tried
        return list(reached.values())

    def _promising(self, start: Candidate, fitting: list[Candidate]) -> list[tuple[Technique, ...]]:
        """The techniques to add, first those that attack most of what is there at the peak.

        Alone all are tried, since some act on more than they attack; what cannot act alone is not tried again.
        """
        families = [family for name, family in self.families.items() if name not in start.names]
        families = [family for family in families if self.known.get((family[-1],), self.baseline)]
        families = [family for family in families if NUMERICS.index(family[0].numerics) < _best(fitting)]
        if not start.changes:
            return families
        attacked = {family: attacked_bytes(family[-1], start.predicted) for family in families}
        least = WORTHWHILE * sum(start.predicted.by_category.values())
        return sorted((f for f in families if attacked[f] >= least), key=lambda f: -attacked[f])[:EXTENSIONS]

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
        return alone.extra_time if alone else 0.0

    def _gentlest(self, candidate: Candidate, change: Technique) -> Candidate:
        """Bisect one technique's settings; the last of them is known to fit."""
        family = self.families[change.name]
        low = 0
        high = len(family) - 1
        while low < high:
            middle = (low + high) // 2
            tried = self._try(tuple(family[middle] if c.name == change.name else c for c in candidate.changes))
            if tried and tried.fits:
                candidate = tried
                high = middle
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
            return None  # no recipe has this set, so there is nothing to report either
        try:
            predicted = self.predict(recipe)
        except ConfigurationError as error:
            self.skipped[replace(recipe, techniques=changes).label] = str(error)
            return None
        self.bar.update()
        return Candidate(recipe, changes, predicted, self.budget_bytes, self.compared_with or self.baseline)


def attacked_bytes(change: Technique, predicted: Prediction) -> int:
    """Of what is there at the peak, that which the technique may make smaller."""
    return sum(predicted.by_category.get(category, 0) for category in {*change.attacks, *ALWAYS_REMOVABLE})


def _best(fitting: list[Candidate]) -> int:
    """The best numerics that fit so far, as a rank; beyond the last rank if nothing does."""
    return min((NUMERICS.index(candidate.numerics) for candidate in fitting), default=len(NUMERICS))


def _without_supersets(candidates: list[Candidate]) -> list[Candidate]:
    distinct = {candidate.names: candidate for candidate in candidates}
    return [candidate for names, candidate in distinct.items() if not any(other < names for other in distinct)]


def _room(candidate: Candidate) -> str:
    return f"{format_bytes(abs(candidate.headroom_bytes))} {'to spare' if candidate.fits else 'too much'}"
