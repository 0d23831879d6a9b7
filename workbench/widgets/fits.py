"""What fits: the recipe on every card there is, and other batches and lengths on the chosen one."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise
from math import nan
from typing import Any

import numpy as np

from workbench.advise.candidate import Candidate
from workbench.errors import ConfigurationError, WorkbenchError
from workbench.gpus.catalogue import GPUS
from workbench.models.load import load_config
from workbench.models.source import locate_config
from workbench.predict.predict import SHADOW, predict_all, resolved
from workbench.recipe import Recipe
from workbench.widgets.pages import page
from workbench.widgets.part import Answer, Part

ROWS, AROUND = 5, 3  # powers of two: of the length, up to the model's positions; of the batch, on either side
NEAR = 0.03  # of the limit: nearer to it a number is predicted, not interpolated


class Row:
    """The recipe at one length, by batch.

    `known` are the bytes that were predicted, `refused` says why there are no more of them, `own` is the recipe's own
    batch, if this is its length. A batch that a technique cannot split is not among `recipes`.
    """

    def __init__(self, recipe: Recipe, length: int, batches: Iterable[int], limit_bytes: int) -> None:
        self.length, self.limit_bytes, self.refused = length, limit_bytes, ""
        self.own = recipe.effective_batch_size if length == recipe.sequence_length else None
        self.recipes, self.known = dict[int, Recipe](), dict[int, int]()
        for batch in batches:
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
        if self.refused or not self.recipes:
            return None
        for first in (self.own, min(self.recipes), max(self.recipes)):
            if first in self.recipes and first not in self.known:
                return first
        fitting, away = self.fitting(), {b: abs(self.needed(b) - self.limit_bytes) for b in self.recipes}
        between = [(b, low, high) for low, high in pairwise(sorted(self.known)) for b in away if low < b < high]
        differ = [b for b, low, high in between if (low in fitting) != (high in fitting)]
        near = [b for b, _, _ in between if away[b] <= NEAR * self.limit_bytes]
        return min([*differ, *near], key=lambda b: away[b], default=None)


def rows_of(recipe: Recipe, limit_bytes: int) -> list[Row]:
    """The recipe at other lengths and batches. Raises as `load_config` does."""
    positions = load_config(locate_config(recipe.model)).max_position_embeddings
    longest, middle = (1 << (n.bit_length() - 1) for n in (positions, recipe.effective_batch_size))
    lengths = {recipe.sequence_length, *(longest >> k for k in range(ROWS))} - {0, 1}
    batches = {recipe.effective_batch_size, *((middle << k) >> AROUND for k in range(2 * AROUND + 1))} - {0}
    return [Row(recipe, length, sorted(batches), limit_bytes) for length in sorted(lengths)]


class WhatFits(Part):
    """A row of all cards, and a table of batch × length."""

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[Answer]:
        recipe = resolved(recipe, [gpu])
        rows, cards = rows_of(recipe, limit_bytes), dict[str, Any]()
        near = sorted(rows, key=lambda row: abs(row.length - recipe.sequence_length))
        for looking in chain(self._cards(recipe, cards), *(self._filled(row, gpu) for row in near), [""]):
            yield page("fits", rows=rows, cards=cards, gpus=GPUS, chosen=gpu, limit=limit_bytes, looking=looking), ()

    def _cards(self, recipe: Recipe, found: dict[str, Any]) -> Iterator[str]:
        """Says before each card what is looked for; what is found goes to `found`. Those of one kind share a trace."""
        for card in GPUS.values():
            yield card.title
            (found[card.name],) = predict_all(recipe, [card.name], engine=SHADOW)

    def _filled(self, row: Row, gpu: str) -> Iterator[str]:
        """Says before each prediction what is looked for."""
        while (batch := row.next()) is not None:
            yield f"{batch} × {row.length} tokens"
            one = row.recipes[batch]
            try:
                row.known[batch] = Candidate(one, (), self.predictor(one, gpu), row.limit_bytes).needed_bytes
            except WorkbenchError as error:
                row.refused = str(error)
