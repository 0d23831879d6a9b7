"""Two recipes side by side, by prediction alone: A is pinned, B is what is chosen now."""

from collections.abc import Iterator
from typing import Any

import ipywidgets as w

from workbench.advise.candidate import Candidate, Predictor
from workbench.predict.predict import resolved
from workbench.recipe import Recipe
from workbench.widgets.light import HBox
from workbench.widgets.pages import page
from workbench.widgets.part import Answer, Choose, Part


class Pinned(Part):
    """What a change saves and costs, category by category, before anything is trained."""

    def __init__(self, choose: Choose, predictor: Predictor | None = None) -> None:
        super().__init__(choose, predictor)
        self.pinned: Recipe | None = None
        self.pin, self.swap, self.clear = (w.Button(description=d) for d in ("Pin as A", "Swap A and B", "Clear A"))
        self.pin.on_click(lambda _: self._pin(self._now[0]))
        self.clear.on_click(lambda _: self._pin(None))
        self.swap.on_click(lambda _: self._swap())
        self.view.children = (HBox([self.pin, self.swap, self.clear], _dom_classes=("wb-row",)), self.page)
        self.show(None, "", 0)

    def show(self, *question: Any) -> None:
        """B from now on; both are predicted for this card and this limit."""
        self._now, recipe = question, question[0]
        self.pin.disabled, self.clear.disabled = recipe is None, self.pinned is None
        self.swap.disabled = recipe is None or self.pinned in (None, recipe)
        super().show(*question, self.pinned)

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int, pinned: Recipe | None) -> Iterator[Answer]:
        both: list[Candidate] = []
        for name, one in (("A", pinned), ("B", recipe)) if pinned else ():
            yield page("words", words=f"Predicting {name}: {one.label} …"), ()
            one = resolved(one, [gpu])
            both.append(Candidate(one, (), self.predictor(one, gpu), limit_bytes, both[0] if both else None))
        yield page("pinned", both=both), ()

    def _pin(self, recipe: Recipe | None) -> None:
        self.pinned = recipe
        self.show(*self._now)

    def _swap(self) -> None:
        before, self.pinned = self.pinned, self._now[0]
        if before is not None:
            self.choose(before)
