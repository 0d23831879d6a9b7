"""Which batches and lengths fit on a card, and which with the planner's best change, as the panel shows it.

A larger batch needs no less memory. So of each length the largest batch that fits is found by bisection, with two or
three predictions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.advise.candidate import Candidate, Predictor
from workbench.advise.plan import plan
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.models.family import positions
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.recipe import Recipe

LENGTHS = 5  # of a table, at least: powers of two, up to the model's positions
BATCHES = 7  # of a table: powers of two, up to so many times the recipe's own:
LARGEST = 8


class Row:
    """The recipe at one length, by batch. Of its batches that were not predicted, those beyond the fitting do not fit.

    Attributes:
        recipes: by batch; not among them is a batch that a technique cannot split, or that is refused.
        own: the recipe's own batch, if this is its length.
        open: the batches of which it is not known yet whether they fit.
        fits_up_to: the largest batch that was predicted to fit.
        predicted_bytes: by batch, where one was predicted.
        refused: why there are no more of them.
    """

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


class Frontier:
    """Batch × length on one card, filled by and by.

    Attributes:
        rows: the recipe, by length.
        change: the planner's best for the recipe or, where that fits, for the fewest tokens that do not; None: there is
            none, or all fits.
        beside: the rows with that change.
    """

    def __init__(self, recipe: Recipe, gpu: str, limit_bytes: int, predict: Predictor) -> None:
        self.recipe = recipe
        self.gpu = gpu
        self.limit_bytes = limit_bytes
        self.predict = predict
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
        if self.recipe in too_large:
            return self.recipe
        return min(too_large, key=_size, default=None)

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


def _size(recipe: Recipe) -> tuple[int, int]:
    return recipe.effective_batch_size * recipe.sequence_length, recipe.effective_batch_size


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `load_config` does."""
    powers = _powers_of_two(positions_of(recipe))
    shortest = max(2, min(recipe.sequence_length, *powers[-LENGTHS:]))
    lengths = {recipe.sequence_length, *(power for power in powers if power >= shortest)}
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
