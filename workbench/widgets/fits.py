"""What fits: the recipe on every card there is, and other batches and lengths on the chosen one."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from workbench.advise.frontier import Frontier
from workbench.gpus.catalogue import GPUS
from workbench.predict.predict import SHADOW, Prediction, predict_all, resolved
from workbench.recipe import Recipe
from workbench.widgets.pages import page
from workbench.widgets.part import Answer, Part


class WhatFits(Part):
    """A row of all cards, and tables of batch × length: as it is, and with the planner's best change."""

    def show(self, *question: Any) -> None:
        """A planner's search for something else ends with its present prediction."""
        self._wanted = question
        super().show(*question)

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[Answer]:
        question = recipe, gpu, limit_bytes

        def ask(wanted: Recipe, name: str) -> Prediction:
            if self._wanted != question:
                raise InterruptedError
            return self.predictor(wanted, name)

        recipe = resolved(recipe, [gpu])
        found, cards = Frontier(recipe, gpu, limit_bytes, ask), dict[str, Any]()
        for looking in chain(self._cards(recipe, cards), found.fill(), [""]):
            yield page("fits", found=found, cards=cards, gpus=GPUS, chosen=gpu, limit=limit_bytes, looking=looking), ()

    def _cards(self, recipe: Recipe, found: dict[str, Any]) -> Iterator[str]:
        """Says before each card what is looked for; what is found goes to `found`. Those of one kind share a trace."""
        for card in GPUS.values():
            yield card.title
            (found[card.name],) = predict_all(recipe, [card.name], engine=SHADOW)
