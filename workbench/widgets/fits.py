"""The part "What fits where": the recipe on every common GPU, and other batches and lengths on the chosen one."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from workbench.advise.frontier import rows_of
from workbench.gpus.catalogue import COMMON
from workbench.prediction.predict import SHADOW, predict_all, resolve_model
from workbench.recipe import Recipe
from workbench.widgets.pages import page
from workbench.widgets.part import Part


class WhatFits(Part):
    """The part of the panel with the common cards in a row, and a table of batch × length for the chosen card."""

    quiet_s = 0.7  # the gauge's own prediction comes first

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[str]:
        recipe = resolve_model(recipe, [gpu])
        rows = rows_of(recipe, limit_bytes)
        nearest_first = sorted(rows, key=lambda row: abs(row.length - recipe.sequence_length))
        cards: dict[str, Any] = {}
        filling = (row.fill(self.predict, gpu) for row in nearest_first)
        for looking in chain(predict_cards(recipe, cards), *filling, [""]):
            yield page("fits", rows=rows, cards=cards, gpus=COMMON, chosen=gpu, limit=limit_bytes, looking=looking)


def predict_cards(recipe: Recipe, predictions: dict[str, Any]) -> Iterator[str]:
    """Predict the recipe on every common card, and yield each card's title before its prediction.

    Args:
        predictions: takes the prediction, or the error, by the card's name. Cards of one kind share a trace.
    """
    for card in COMMON.values():
        yield card.title
        (predictions[card.name],) = predict_all(recipe, [card.name], engine=SHADOW)
