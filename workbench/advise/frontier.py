"""`frontier(recipe, gpu="t4")`: which batches and lengths fit on a card, and which with the planner's best change.

A larger batch needs no less memory. So of each length the largest batch that fits is found by bisection, with two or
three predictions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from workbench.advise.candidate import Candidate, Predictor
from workbench.advise.plan import plan
from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.result import Result
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.models.family import positions
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.prediction import predict as prediction
from workbench.recipe import Recipe

LENGTHS = 5  # of a table, at least: powers of two, up to the model's positions
BATCHES = 7  # of a table: powers of two, up to so many times the recipe's own:
LARGEST = 8
SIGNS = "✓ fits, ✗ does not; a cell without a number follows from one with; – cannot be had; [ ] as asked"
COLOURS = {"✓": "#c5bfdb", "✗": "#fdd0a2", "–": "white"}  # violet, orange
PICTURES = (".png", ".svg", ".pdf")


class Row(Result):
    """The recipe at one length, by batch. Of its batches that were not predicted, those beyond the fitting do not fit.

    Attributes:
        recipes: by batch; not among them is a batch that a technique cannot split, or that is refused.
        own: the recipe's own batch, if this is its length.
        open: the batches of which it is not known yet whether they fit.
        fits_up_to: the largest batch that was predicted to fit.
        predicted_bytes: by batch, where one was predicted.
        refused: why there are no more of them.
    """

    json_fields = ("length", "batches", "fitting", "predicted_bytes", "refused")

    def __init__(self, recipe: Recipe, length: int, batches: Sequence[int], limit_bytes: int) -> None:
        self.length = length
        self.batches = batches
        self.limit_bytes = limit_bytes
        self.own = recipe.effective_batch_size if length == recipe.sequence_length else None
        self.recipes: dict[int, Recipe] = {}
        for batch in batches:
            with suppress(ConfigurationError):
                self.recipes[batch] = replace(recipe, sequence_length=length, effective_batch_size=batch)
        self.open = list(self.recipes)
        self.fits_up_to = 0
        self.predicted_bytes: dict[int, int] = {}
        self.refused = ""

    def fill(self, predict: Predictor, gpu: str) -> Iterator[str]:
        """Bisect, from the recipe's own batch on. Says before each prediction what is looked for."""
        while self.open:
            batch = self.own if self.own in self.open else self.open[len(self.open) // 2]
            yield f"{batch} × {self.length} tokens"
            if self._predict(batch, predict, gpu):
                self.fits_up_to = batch
                self.open = [larger for larger in self.open if larger > batch]
            else:
                self.open = [smaller for smaller in self.open if smaller < batch]

    def _predict(self, batch: int, predict: Predictor, gpu: str) -> bool:
        """Whether it fits. What is refused is refused to larger batches, too."""
        try:
            needed_bytes = predict(self.recipes[batch], gpu).need_bytes
        except WorkbenchError as error:
            self.refused = str(error)
            self.recipes = {smaller: recipe for smaller, recipe in self.recipes.items() if smaller < batch}
            return False
        self.predicted_bytes[batch] = needed_bytes
        return needed_bytes <= self.limit_bytes

    def sign(self, batch: int) -> str:
        if batch in self.open:
            return "…"
        if batch not in self.recipes:
            return "–"
        return "✓" if batch <= self.fits_up_to else "✗"

    @property
    def fitting(self) -> list[int]:
        return [batch for batch in self.recipes if batch <= self.fits_up_to]


class Frontier(Result):
    """Batch × length on one card, filled by and by.

    Attributes:
        rows: the recipe, by length.
        change: the planner's best for the recipe or, where that fits, for the fewest tokens that do not; None: there is
            none, or all fits.
        beside: the rows with that change.
        engine: who predicts.
    """

    json_fields = ("gpu", "engine", "limit_bytes", "rows", "change", "beside")

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
            for row in self.rows:
                self.beside.append(Row(self.change.recipe, row.length, row.batches, self.limit_bytes))
            yield from self._filled(self.beside)

    def _filled(self, rows: list[Row]) -> Iterator[str]:
        for row in sorted(rows, key=lambda row: abs(row.length - self.recipe.sequence_length)):
            yield from row.fill(self.predict, self.gpu)

    def beyond(self) -> Recipe | None:
        """The recipe, or that with the fewest tokens of those that do not fit."""
        too_large = []
        for row in self.rows:
            too_large += [recipe for batch, recipe in row.recipes.items() if row.sign(batch) == "✗"]
        return min(too_large, key=self._distance, default=None)

    def _distance(self, other: Recipe) -> tuple[bool, int, int]:
        return other != self.recipe, other.effective_batch_size * other.sequence_length, other.effective_batch_size

    def _planned(self, target: Recipe) -> Candidate | None:
        try:
            planned = plan(budget=self.limit_bytes, gpu=self.gpu, predict=self.predict, **vars(target))
        except ConfigurationError:  # the card has less than the weights
            return None
        return planned[0] if planned.candidates else None

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


def frontier(recipe: Recipe, gpu: str = "h100", *, engine: str | None = None) -> Frontier:
    """Which batches and lengths fit on a GPU.

    Raises:
        ConfigurationError: an unknown GPU or engine, a model that cannot be used, or no cell can be predicted.
        UnavailableError: the config of a hub model cannot be had, or the emulator asked for is not set up.
    """
    card = find_gpu(gpu)
    engine = prediction.engine_for(card.name, engine)
    predict = partial(prediction.predict, engine=engine)
    cells = Frontier(prediction.resolved(recipe, [card.name]), card.name, card.memory_bytes, predict, engine)
    for _ in tqdm(cells.fill(), desc="predicting", unit=" cells", disable=None, leave=False):
        pass  # the bar moves
    if not any(row.predicted_bytes for row in cells.rows):
        raise ConfigurationError(cells.rows[0].refused)
    return cells


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `load_config` does."""
    lengths = {recipe.sequence_length}
    powers = _powers_of_two(positions_of(recipe))
    lengths.update(powers[-LENGTHS:])
    lengths.update(power for power in powers if power >= recipe.sequence_length)
    lengths.discard(1)
    batches = {recipe.effective_batch_size, *_powers_of_two(LARGEST * recipe.effective_batch_size)[-BATCHES:]}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


def positions_of(recipe: Recipe) -> int:
    """How many tokens the model takes. Raises as `load_config` does."""
    return positions(load_config(locate_config(recipe.model)))


def _powers_of_two(most: int) -> list[int]:
    powers = [1]
    while 2 * powers[-1] <= most:
        powers.append(2 * powers[-1])
    return powers


def _table(rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [f"{'tokens':>7}" + "".join(f"{batch:>12}" for batch in rows[0].batches)]
    for row in rows:
        lines.append(f"{row.length:>7}" + "".join(f"{_cell(row, batch):>12}" for batch in row.batches))
    return lines


def _cell(row: Row, batch: int) -> str:
    cell = row.sign(batch)
    if batch in row.predicted_bytes:
        cell += f" {format_bytes(row.predicted_bytes[batch])}"
    return f"[{cell}]" if batch == row.own else cell


def save_picture(cells: Frontier, path: Path) -> None:
    """Both tables in colours."""
    from matplotlib.figure import Figure

    tables = {cells.recipe.label: cells.rows}
    if cells.change:
        tables[cells.change.label] = cells.beside
    figure = Figure(figsize=(6.4 * len(tables), 4.2), layout="constrained")
    (panels,) = figure.subplots(1, len(tables), squeeze=False)
    for panel, (title, rows) in zip(panels, tables.items(), strict=True):
        batches = rows[0].batches
        table = panel.table(
            cellText=[[_cell(row, batch) for batch in batches] for row in rows],
            cellColours=[[COLOURS[row.sign(batch)] for batch in batches] for row in rows],
            rowLabels=[f"{row.length} tokens" for row in rows],
            colLabels=batches,
            loc="center",
        )
        table.scale(1, 2.4)
        panel.set_title(title)
        panel.axis("off")
    limit = f"{format_bytes(cells.limit_bytes)} ({cells.gpu})"
    figure.suptitle(f"{cells.recipe.model}, batch × length within {limit}, predicted")
    figure.savefig(path, dpi=130)
