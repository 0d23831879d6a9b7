"""What fits: the recipe on every card there is, and other batches and lengths on the chosen one."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from workbench.advise.frontier import Frontier
from workbench.gpus.catalogue import COMMON
from workbench.prediction.predict import SHADOW, predict_all, resolved
from workbench.recipe import Recipe
from workbench.techniques import Technique
from workbench.widgets.pages import page
from workbench.widgets.part import Part


class WhatFits(Part):
    """A row of all cards, and tables of batch × length: as it is, and with the planner's best change."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: tuple[Technique, ...] = ()  # of the second table

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[str]:
        recipe = resolved(recipe, [gpu])
        cells = Frontier(recipe, gpu, limit_bytes, self.predict)
        self.changes = ()
        cards: dict[str, Any] = {}
        for looking in chain(predict_cards(recipe, cards), cells.fill(), [""]):
            if cells.change:
                self.changes = cells.change.recipe.techniques
            yield page(
                "fits",
                found=cells,
                cards=cards,
                gpus=COMMON,
                chosen=gpu,
                limit=limit_bytes,
                looking=looking,
            )


def predict_cards(recipe: Recipe, predictions: dict[str, Any]) -> Iterator[str]:
    """Says before each card what is looked for; the prediction, or the error, goes to `predictions`. Cards of one kind
    share a trace."""
    for card in COMMON.values():
        yield card.title
        (predictions[card.name],) = predict_all(recipe, [card.name], engine=SHADOW)
