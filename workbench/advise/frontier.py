"""Which batches and lengths fit on a card, as the panel shows it.

A larger batch needs no less memory. So of each length the largest batch that fits is found by bisection, with two or
three predictions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.advise.candidate import Predictor
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.models.family import positions
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

    def __init__(
        self,
        recipe: Recipe,
        length: int,
        batches: Sequence[int],
        limit_bytes: int,
    ) -> None:
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
            middle = len(self.open) // 2
            if self.own in self.open:
                middle = self.open.index(self.own)
            batch = self.open[middle]
            yield f"{batch} × {self.length} tokens"
            if self._predict(batch, predict, gpu):
                self.fits_up_to = batch
                self.open = self.open[middle + 1 :]
            else:
                self.open = self.open[:middle]

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
        if batch <= self.fits_up_to:
            return "✓"
        return "✗"


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `recipe.config` does."""
    powers = _powers_of_two(positions(recipe.config))
    shortest = max(2, min(recipe.sequence_length, *powers[-LENGTHS:]))
    lengths = {recipe.sequence_length, *(power for power in powers if power >= shortest)}
    batches = {recipe.effective_batch_size, *_powers_of_two(LARGEST * recipe.effective_batch_size)[-BATCHES:]}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]
