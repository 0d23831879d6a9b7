"""A table of the batches and lengths that fit on a card, as the panel shows it.

A larger batch needs no less memory. So bisection finds the largest batch that fits at each length, with two or three
predictions.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from workbench.advise.candidate import Predictor
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.models.family import positions
from workbench.recipe import Recipe

LENGTHS = 5  # lengths in a table, at least: powers of two, up to the model's positions
BATCHES = 7  # batches in a table: powers of two
LARGEST = 8  # the largest batch, as a multiple of the recipe's own


class Row:
    """A row of the table: the recipe at one length, with batches of several sizes.

    A batch that was not predicted does not fit if it is larger than the largest that does.

    Attributes:
        recipes: the recipe by batch. A batch that a technique cannot split, or that is refused, has none.
        recipe_batch: the batch of the recipe itself, if this is its length; None otherwise.
        open: the batches of which it is not known yet whether they fit.
        fits_up_to: the largest batch that was predicted to fit; 0 if none was.
        predicted_bytes: the memory by batch, where it was predicted.
        refused: why the largest batches were refused; empty if none was.
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
        self.recipe_batch = recipe.effective_batch_size if length == recipe.sequence_length else None
        self.recipes: dict[int, Recipe] = {}
        for batch in batches:
            with suppress(ConfigurationError):
                self.recipes[batch] = replace(recipe, sequence_length=length, effective_batch_size=batch)
        self.open = list(self.recipes)
        self.fits_up_to = 0
        self.predicted_bytes: dict[int, int] = {}
        self.refused = ""

    def fill(self, predict: Predictor, gpu: str) -> Iterator[str]:
        """Bisect, beginning with the recipe's own batch. Yield a description of each prediction before it is made."""
        while self.open:
            middle = len(self.open) // 2
            if self.recipe_batch in self.open:
                middle = self.open.index(self.recipe_batch)
            batch = self.open[middle]
            yield f"{batch} × {self.length} tokens"
            if self._predict(batch, predict, gpu):
                self.fits_up_to = batch
                self.open = self.open[middle + 1 :]
            else:
                self.open = self.open[:middle]

    def _predict(self, batch: int, predict: Predictor, gpu: str) -> bool:
        """Predict a batch, and return whether it fits. A batch that is refused takes all larger ones with it."""
        try:
            needed_bytes = predict(self.recipes[batch], gpu).need_bytes
        except WorkbenchError as error:
            self.refused = str(error)
            self.recipes = {smaller: recipe for smaller, recipe in self.recipes.items() if smaller < batch}
            return False
        self.predicted_bytes[batch] = needed_bytes
        return needed_bytes <= self.limit_bytes

    def sign(self, batch: int) -> str:
        """Return `✓` for a batch that fits, `✗` for one that does not, `–` if there is none, `…` before it is known."""
        if batch in self.open:
            return "…"
        if batch not in self.recipes:
            return "–"
        if batch <= self.fits_up_to:
            return "✓"
        return "✗"


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """Return the rows of a table: the recipe at other lengths and batches. Raises what `recipe.config` raises."""
    powers = _powers_of_two(positions(recipe.config))
    shortest = max(2, min(recipe.sequence_length, *powers[-LENGTHS:]))
    lengths = {recipe.sequence_length, *(power for power in powers if power >= shortest)}
    batches = {recipe.effective_batch_size, *_powers_of_two(LARGEST * recipe.effective_batch_size)[-BATCHES:]}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())]
