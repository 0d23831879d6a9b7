"""Several cards: what each of them needs beside one card alone, however they share the model and the batch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ipywidgets as w

from workbench.advise.candidate import Candidate, Predictor
from workbench.predict.predict import resolved
from workbench.ranks.shards import SHARDS
from workbench.recipe import Recipe
from workbench.widgets.gauge import NARROW, Limit
from workbench.widgets.light import LABEL, HBox
from workbench.widgets.pages import page
from workbench.widgets.part import Answer, Choose, Part

COUNTS = (2, 4, 8, 16, 64)


class SeveralCards(Part):
    """The bar of one rank, for a number of cards and a way to share that can be chosen here."""

    def __init__(self, choose: Choose, predictor: Predictor | None = None) -> None:
        super().__init__(choose, predictor)
        batches = [("shared by all cards", True), ("as large on each card as on one", False)]
        self.count = w.Dropdown(options=COUNTS, description="cards", style=LABEL, layout=NARROW)
        self.shard = w.Dropdown(options=tuple(SHARDS), value="full", description="shard", style=LABEL, layout=NARROW)
        self.batch = w.Dropdown(options=batches, description="batch", style=LABEL, layout=NARROW)
        self.made = (self.count, self.shard, self.batch)
        for made in self.made:
            made.observe(lambda _: self.show(*self._now), names="value")
        self.view.children = (HBox(self.made, _dom_classes=("wb-row",)), self.page)
        self.show(None, "", 0)

    def show(self, *question: Any) -> None:
        """As every part, and with what is chosen here."""
        self._now = question
        super().show(*question, *(made.value for made in self.made))

    def answers(
        self, recipe: Recipe, gpu: str, limit_bytes: int, count: int, shard: str, shared: bool
    ) -> Iterator[Answer]:
        yield page("words", words=f"Predicting one of {count} cards …"), ()
        recipe = resolved(recipe, [gpu])
        whole = recipe if shared else replace(recipe, effective_batch_size=count * recipe.effective_batch_size)
        of_one, of_many = self.predictor(recipe, gpu), self.predictor(whole, gpu, ranks=count, shard=shard)
        one = Candidate(recipe, (), of_one, limit_bytes)
        each = Candidate(whole, (), of_many, limit_bytes, options=f"--ranks {count} --shard {shard}")
        both = {"One card alone": one, f"Each of {count} cards": each}
        names = {"parts_of": Limit(gpu).parts_of, "have": limit_bytes, "title_of_shard": SHARDS[shard]["title"]}
        yield page("several", both=both, each=each, **names), ()
