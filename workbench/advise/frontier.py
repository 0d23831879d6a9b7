"""`frontier(recipe, gpu="t4")`: which batches and lengths fit on a card, and which with the planner's best change."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from workbench.advise.candidate import Candidate, Predictor
from workbench.advise.plan import plan
from workbench.errors import ConfigurationError, WorkbenchError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.measure.categories import format_bytes
from workbench.models.family import positions
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.predict import predict as prediction
from workbench.recipe import Recipe

ROWS, AROUND = 5, 3  # powers of two: of the length, up to the model's positions; of the batch, on either side
NEAR = 0.03  # of the limit: nearer to it a number is predicted, not interpolated
SIGNS = "✓ fits, ✗ does not; without a number: it lies between two that do, or do not; – cannot be had; [ ] as asked"
PICTURES = (".png", ".svg", ".pdf")


class Row:
    """The recipe at one length, by batch.

    `known` are the bytes that were predicted, `refused` says why there are no more of them, `own` is the recipe's own
    batch, if this is its length. A batch that a technique cannot split, or that is refused, is not among `recipes`.
    """

    def __init__(self, recipe: Recipe, length: int, batches: Iterable[int], limit_bytes: int) -> None:
        self.length, self.batches, self.limit_bytes, self.refused = length, tuple(batches), limit_bytes, ""
        self.own = recipe.effective_batch_size if length == recipe.sequence_length else None
        self.recipes, self.known = dict[int, Recipe](), dict[int, int]()
        for batch in self.batches:
            with suppress(ConfigurationError):
                self.recipes[batch] = replace(recipe, sequence_length=length, effective_batch_size=batch)

    def needed(self, batch: int) -> float:
        """Bytes, predicted, or on the straight line between the nearest predicted ones; nan: not known."""
        known: dict[int, float] = {**self.known} or {0: nan}
        return float(np.interp(batch, sorted(known), [known[b] for b in sorted(known)], left=nan, right=nan))

    def fitting(self) -> list[int]:
        return [batch for batch in self.recipes if self.needed(batch) <= self.limit_bytes]

    def next(self) -> int | None:
        """The batch to predict: the own, both ends, then of the cells that are not certain that nearest to the limit.

        Certain is what lies between two that fit, or two that do not, and is not near the limit: memory grows with the
        batch, slowly at first and then steeply, where another moment of the step becomes the peak.
        """
        if not self.recipes:
            return None
        for first in (self.own, min(self.recipes), max(self.recipes)):
            if first in self.recipes and first not in self.known:
                return first
        fitting, away = self.fitting(), {b: abs(self.needed(b) - self.limit_bytes) for b in self.recipes}
        between = [(b, low, high) for low, high in pairwise(sorted(self.known)) for b in away if low < b < high]
        differ = [b for b, low, high in between if (low in fitting) != (high in fitting)]
        near = [b for b, _, _ in between if away[b] <= NEAR * self.limit_bytes]
        return min([*differ, *near], key=lambda b: away[b], default=None)

    def predict(self, batch: int, predict: Predictor, gpu: str) -> None:
        """What is refused is refused to larger batches, too."""
        try:
            one = self.recipes[batch]
            self.known[batch] = Candidate(one, (), predict(one, gpu), self.limit_bytes).needed_bytes
        except WorkbenchError as error:
            self.refused = str(error)
            self.recipes = {smaller: recipe for smaller, recipe in self.recipes.items() if smaller < batch}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; of batches that are neither fitting nor predicted, those beyond the fitting ones do not fit."""
        known = {"batches": self.batches, "fitting": self.fitting(), "predicted_bytes": self.known}
        return {"length": self.length, **known, "refused": self.refused}


def positions_of(recipe: Recipe) -> int:
    """How many tokens the model takes. Raises as `load_config` does."""
    return positions(load_config(locate_config(recipe.model)))


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `load_config` does."""
    most = positions_of(recipe)
    longest, middle = (1 << (n.bit_length() - 1) for n in (most, recipe.effective_batch_size))
    many = max(ROWS, (longest // recipe.sequence_length).bit_length())
    lengths = {recipe.sequence_length, *(longest >> k for k in range(many))} - {0, 1}
    batches = {recipe.effective_batch_size, *((middle << k) >> AROUND for k in range(2 * AROUND + 1))} - {0}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


class Frontier:
    """Batch × length on one card, filled by and by.

    Attributes:
        rows: the recipe, by length.
        change: the planner's best for the recipe or, where that fits, for the fewest tokens that do not; None: there is
            none, or all fits.
        beside: the rows with that change.
        engine: who predicts.
    """

    def __init__(self, recipe: Recipe, gpu: str, limit_bytes: int, predict: Predictor, engine: str = "") -> None:
        self.recipe, self.gpu, self.limit_bytes, self.predict, self.engine = recipe, gpu, limit_bytes, predict, engine
        self.rows, self.beside = rows_of(recipe, limit_bytes), list[Row]()
        self.change: Candidate | None = None

    def fill(self) -> Iterator[str]:
        """Says before each prediction what is looked for."""
        yield from self._filled(self.rows)
        if target := self.beyond():
            yield "what makes more of it fit"
            self.change = self._planned(target)
        if self.change:
            changed = self.change.recipe
            self.beside = [Row(changed, row.length, row.batches, self.limit_bytes) for row in self.rows]
            yield from self._filled(self.beside)

    def _filled(self, rows: list[Row]) -> Iterator[str]:
        for row in sorted(rows, key=lambda row: abs(row.length - self.recipe.sequence_length)):
            while (batch := row.next()) is not None:
                yield f"{batch} × {row.length} tokens"
                row.predict(batch, self.predict, self.gpu)

    def beyond(self) -> Recipe | None:
        """The recipe, or that with the fewest tokens of those that do not fit."""
        over = [one for row in self.rows for b, one in row.recipes.items() if row.needed(b) > self.limit_bytes]
        return min(over, key=self._distance, default=None)

    def _distance(self, one: Recipe) -> tuple[bool, int, int]:
        return one != self.recipe, one.effective_batch_size * one.sequence_length, one.effective_batch_size

    def _planned(self, target: Recipe) -> Candidate | None:
        with suppress(ConfigurationError):  # the card has less than the weights
            found = plan(budget=self.limit_bytes, gpu=self.gpu, predict=self.predict, **vars(target))
            return next(iter(found), None)
        return None

    @property
    def change_words(self) -> str:
        """What the rows beside are, and for which cell the planner was asked."""
        if self.change is None:
            return "The planner knows no change for it." if self.beyond() else "All of it fits: nothing to change."
        shape = f"{self.change.recipe.effective_batch_size} × {self.change.recipe.sequence_length} tokens"
        return f"{self.change.words} (loss {self.change.numerics}; the planner's first for {shape})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows, beside = ([row.to_dict() for row in rows] for rows in (self.rows, self.beside))
        change = self.change and self.change.to_dict()
        facts = {"gpu": self.gpu, "engine": self.engine, "limit_bytes": self.limit_bytes}
        return facts | {"rows": rows, "change": change, "beside": beside}


def frontier(recipe: Recipe, gpu: str = "h100", *, engine: str | None = None) -> Frontier:
    """Which batches and lengths fit on a GPU.

    Raises:
        ConfigurationError: an unknown GPU or engine, a model that cannot be used, or no cell can be predicted.
        UnavailableError: the config of a hub model cannot be had, or the emulator asked for is not set up.
    """
    card, chosen = find_gpu(gpu), prediction.engine_for(gpu, engine)
    predict = partial(prediction.predict, engine=chosen)
    found = Frontier(prediction.resolved(recipe, [card.name]), card.name, card.memory_bytes, predict, chosen)
    deque(tqdm(found.fill(), desc="predicting", unit=" cells", disable=None, leave=False), 0)
    if not any(row.known for row in found.rows):
        raise ConfigurationError(found.rows[0].refused)
    return found


def frontier_text(found: Frontier) -> str:
    """Both tables as people read them."""
    title = f"{found.recipe.label} on {found.recipe.model}, batch × length within {format_bytes(found.limit_bytes)}"
    how = f"{title} ({found.gpu}), predicted by the {found.engine}, not measured"
    refused = [f"refused, {row.length} tokens: {row.refused}" for row in found.rows if row.refused]
    return "\n".join([how, SIGNS, *_table(found.rows), "", found.change_words, *_table(found.beside), *refused])


def _table(rows: list[Row]) -> list[str]:
    head = [f"{'tokens':>7}" + "".join(f"{batch:>12}" for batch in row.batches) for row in rows[:1]]
    return [*head, *(f"{row.length:>7}" + "".join(_cell(row, batch) for batch in row.batches) for row in rows)]


def _cell(row: Row, batch: int) -> str:
    sign = "–" if batch not in row.recipes else "✓" if batch in row.fitting() else "✗"
    words = f"{sign} {format_bytes(row.known[batch])}" if batch in row.known else sign
    return f"{f'[{words}]' if batch == row.own else words:>12}"


def save_picture(found: Frontier, path: Path) -> None:
    """Both tables as heat maps: violet fits, orange does not, and what is white is near the limit."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    maps = {found.recipe.label: found.rows} | ({found.change.label: found.beside} if found.change else {})
    figure = Figure(figsize=(6.4 * len(maps), 4.2), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        shares = np.array([[row.needed(batch) / found.limit_bytes for batch in row.batches] for row in rows])
        axes.imshow(shares, cmap="PuOr_r", norm=TwoSlopeNorm(1.0, 0.0, 2.0), origin="lower", aspect="auto", alpha=0.6)
        for y, row in enumerate(rows):
            for x, batch in enumerate(row.batches):
                axes.text(x, y, _cell(row, batch).strip().replace(" ", "\n", 1), ha="center", va="center", fontsize=8)
        axes.set(title=title, xlabel="batch, sequences", ylabel="length, tokens")
        axes.set_xticks(range(len(rows[0].batches)), [str(batch) for batch in rows[0].batches])
        axes.set_yticks(range(len(rows)), [str(row.length) for row in rows])
    figure.suptitle(f"{found.recipe.model} within {format_bytes(found.limit_bytes)} ({found.gpu}), predicted")
    figure.savefig(path, dpi=130)
