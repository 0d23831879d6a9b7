"""`frontier(recipe, gpu="t4")`: which batches and lengths fit on a card, and which with the planner's best change."""

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

ROWS = 5  # lengths: powers of two, up to the model's positions
AROUND = 3  # batches on either side of the recipe's own, in powers of two
NEAR = 0.03  # of the limit: nearer to it a number is predicted, not interpolated
SIGNS = "✓ fits, ✗ does not; without a number: it lies between two that do, or do not; – cannot be had; [ ] as asked"
PICTURES = (".png", ".svg", ".pdf")


class Row:
    """The recipe at one length, by batch.

    `known` are the bytes that were predicted, `refused` says why there are no more of them, `own` is the recipe's own
    batch, if this is its length. A batch that a technique cannot split, or that is refused, is not among `recipes`.
    """

    def __init__(self, recipe: Recipe, length: int, batches: Iterable[int], limit_bytes: int) -> None:
        self.length = length
        self.batches = tuple(batches)
        self.limit_bytes = limit_bytes
        self.refused = ""
        self.own = recipe.effective_batch_size if length == recipe.sequence_length else None
        self.recipes: dict[int, Recipe] = {}
        self.known: dict[int, int] = {}
        for batch in self.batches:
            with suppress(ConfigurationError):
                self.recipes[batch] = replace(recipe, sequence_length=length, effective_batch_size=batch)

    def needed(self, batch: int) -> float:
        """Bytes, predicted, or on the straight line between the nearest predicted ones; nan: not known."""
        if not self.known:
            return nan
        batches = sorted(self.known)
        return float(np.interp(batch, batches, [self.known[b] for b in batches], left=nan, right=nan))

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
        fitting = self.fitting()
        distance = {batch: abs(self.needed(batch) - self.limit_bytes) for batch in self.recipes}
        unclear = []
        near = []
        for low, high in pairwise(sorted(self.known)):
            between = [batch for batch in self.recipes if low < batch < high]
            if (low in fitting) != (high in fitting):
                unclear += between
            near += [batch for batch in between if distance[batch] <= NEAR * self.limit_bytes]
        return min([*unclear, *near], key=lambda batch: distance[batch], default=None)

    def predict(self, batch: int, predict: Predictor, gpu: str) -> None:
        """What is refused is refused to larger batches, too."""
        try:
            recipe = self.recipes[batch]
            self.known[batch] = Candidate(recipe, (), predict(recipe, gpu), self.limit_bytes).needed_bytes
        except WorkbenchError as error:
            self.refused = str(error)
            self.recipes = {smaller: recipe for smaller, recipe in self.recipes.items() if smaller < batch}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; of batches that are neither fitting nor predicted, those beyond the fitting ones do not fit."""
        return {
            "length": self.length,
            "batches": self.batches,
            "fitting": self.fitting(),
            "predicted_bytes": self.known,
            "refused": self.refused,
        }


def positions_of(recipe: Recipe) -> int:
    """How many tokens the model takes. Raises as `load_config` does."""
    return positions(load_config(locate_config(recipe.model)))


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `load_config` does."""
    longest = _power_of_two(positions_of(recipe))
    middle = _power_of_two(recipe.effective_batch_size)
    halvings = max(ROWS, (longest // recipe.sequence_length).bit_length())  # down to the recipe's own length
    lengths = {recipe.sequence_length, *(longest // 2**halving for halving in range(halvings))} - {0, 1}
    around = (middle * 2**doubling // 2**AROUND for doubling in range(2 * AROUND + 1))
    batches = {recipe.effective_batch_size, *around} - {0}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


def _power_of_two(number: int) -> int:
    """The largest that is not larger."""
    return 1 << (number.bit_length() - 1)


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
        self.recipe = recipe
        self.gpu = gpu
        self.limit_bytes = limit_bytes
        self.predict = predict
        self.engine = engine
        self.rows = rows_of(recipe, limit_bytes)
        self.change: Candidate | None = None
        self.beside: list[Row] = []

    def fill(self) -> Iterator[str]:
        """Says before each prediction what is looked for."""
        yield from self._filled(self.rows)
        target = self.beyond()
        if target:
            yield "what makes more of it fit"
            self.change = self._planned(target)
        if self.change:
            changed = self.change.recipe
            self.beside = [Row(changed, row.length, row.batches, self.limit_bytes) for row in self.rows]
            yield from self._filled(self.beside)

    def _filled(self, rows: list[Row]) -> Iterator[str]:
        for row in sorted(rows, key=lambda row: abs(row.length - self.recipe.sequence_length)):
            batch = row.next()
            while batch is not None:
                yield f"{batch} × {row.length} tokens"
                row.predict(batch, self.predict, self.gpu)
                batch = row.next()

    def beyond(self) -> Recipe | None:
        """The recipe, or that with the fewest tokens of those that do not fit."""
        too_large = []
        for row in self.rows:
            too_large += [recipe for batch, recipe in row.recipes.items() if row.needed(batch) > self.limit_bytes]
        return min(too_large, key=self._distance, default=None)

    def _distance(self, other: Recipe) -> tuple[bool, int, int]:
        return other != self.recipe, other.effective_batch_size * other.sequence_length, other.effective_batch_size

    def _planned(self, target: Recipe) -> Candidate | None:
        try:
            planned = plan(budget=self.limit_bytes, gpu=self.gpu, predict=self.predict, **vars(target))
        except ConfigurationError:  # the card has less than the weights
            return None
        return next(iter(planned), None)

    @property
    def change_words(self) -> str:
        """What the rows beside are, and for which cell the planner was asked."""
        if self.change is None:
            return "The planner knows no change for it." if self.beyond() else "All of it fits: nothing to change."
        shape = f"{self.change.recipe.effective_batch_size} × {self.change.recipe.sequence_length} tokens"
        return f"{self.change.words} (loss {self.change.numerics}; the planner's first for {shape})"

    def __str__(self) -> str:
        title = f"{self.recipe.label} on {self.recipe.model}, batch × length within {format_bytes(self.limit_bytes)}"
        lines = [f"{title} ({self.gpu}), predicted by the {self.engine}, not measured", SIGNS]
        lines += [*_table(self.rows), "", self.change_words, *_table(self.beside)]
        lines += [f"refused, {row.length} tokens: {row.refused}" for row in self.rows if row.refused]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "gpu": self.gpu,
            "engine": self.engine,
            "limit_bytes": self.limit_bytes,
            "rows": [row.to_dict() for row in self.rows],
            "change": self.change and self.change.to_dict(),
            "beside": [row.to_dict() for row in self.beside],
        }


def frontier(recipe: Recipe, gpu: str = "h100", *, engine: str | None = None) -> Frontier:
    """Which batches and lengths fit on a GPU.

    Raises:
        ConfigurationError: an unknown GPU or engine, a model that cannot be used, or no cell can be predicted.
        UnavailableError: the config of a hub model cannot be had, or the emulator asked for is not set up.
    """
    card = find_gpu(gpu)
    engine = prediction.engine_for(gpu, engine)
    predict = partial(prediction.predict, engine=engine)
    cells = Frontier(prediction.resolved(recipe, [card.name]), card.name, card.memory_bytes, predict, engine)
    for _ in tqdm(cells.fill(), desc="predicting", unit=" cells", disable=None, leave=False):
        pass  # the bar moves
    if not any(row.known for row in cells.rows):
        raise ConfigurationError(cells.rows[0].refused)
    return cells


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"{'tokens':>7}" + "".join(f"{batch:>12}" for batch in rows[0].batches)]
    for row in rows:
        lines.append(f"{row.length:>7}" + "".join(f"{_cell(row, batch):>12}" for batch in row.batches))
    return lines


def _cell(row: Row, batch: int) -> str:
    cell = "✓" if batch in row.fitting() else "✗"
    if batch not in row.recipes:
        cell = "–"
    if batch in row.known:
        cell += f" {format_bytes(row.known[batch])}"
    return f"[{cell}]" if batch == row.own else cell


def save_picture(cells: Frontier, path: Path) -> None:
    """Both tables as heat maps: violet fits, orange does not, and what is white is near the limit."""
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    maps = {cells.recipe.label: cells.rows}
    if cells.change:
        maps[cells.change.label] = cells.beside
    figure = Figure(figsize=(6.4 * len(maps), 4.2), layout="constrained")
    for axes, (title, rows) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
        shares = np.array([[row.needed(batch) / cells.limit_bytes for batch in row.batches] for row in rows])
        axes.imshow(shares, cmap="PuOr_r", norm=TwoSlopeNorm(1.0, 0.0, 2.0), origin="lower", aspect="auto", alpha=0.6)
        for y, row in enumerate(rows):
            for x, batch in enumerate(row.batches):
                axes.text(x, y, _cell(row, batch).replace(" ", "\n", 1), ha="center", va="center", fontsize=8)
        axes.set(title=title, xlabel="batch, sequences", ylabel="length, tokens")
        axes.set_xticks(range(len(rows[0].batches)), [str(batch) for batch in rows[0].batches])
        axes.set_yticks(range(len(rows)), [str(row.length) for row in rows])
    figure.suptitle(f"{cells.recipe.model} within {format_bytes(cells.limit_bytes)} ({cells.gpu}), predicted")
    figure.savefig(path, dpi=130)
