"""Changes that are predicted to fit, as cards: advice after an out-of-memory, and plans for the recipe as it is."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import ipywidgets as w

from workbench.advise.candidate import Candidate, Predictor, rank
from workbench.advise.doctor import cause, diagnose, promising
from workbench.advise.plan import THIS_CPU, Search, families
from workbench.gpus.catalogue import GPUS
from workbench.predict.predict import Prediction, resolved
from workbench.recipe import Recipe
from workbench.records.record import Record
from workbench.widgets.background import SEARCH
from workbench.widgets.pages import page
from workbench.widgets.part import Answer, Choose, Part

MOST = 6  # cards of one search


class Advice(Part):
    """After a run that ran out of memory: the cause at once, then each single change that is found to fit."""

    quiet_s = 0.0

    def answers(self, record: Record) -> Iterator[Answer]:
        ask, found = cache(self.predictor), list[Candidate]()
        with SEARCH:
            yield page("advice", cause=cause(record), looking="the recipe as it is", found=found), ()
            for name in (among := promising(record, ask)):
                yield page("advice", cause=cause(record), looking=name, found=found), sorted(found, key=rank)[:MOST]
                found += diagnose(record, among=[name], predict=ask).changes
            whole = diagnose(record, among=among, predict=ask)
        yield page("advice", cause=whole.cause, whole=whole), whole.changes[:MOST] or [c for c in [whole.closest] if c]


class MakeItFit(Part):
    """The planner behind one button. What it found stays when the recipe changes, and is said to be older."""

    quiet_s = 0.0

    def __init__(self, choose: Choose, predictor: Predictor | None = None) -> None:
        super().__init__(choose, predictor)
        self._wanted: tuple[Any, ...] = (None,)
        self.button = w.Button(description="Make it fit", button_style="primary", tooltip="look for changes that fit")
        self.button.on_click(lambda _: super(MakeItFit, self).show(*self._wanted))
        self.view.children = (self.button, *self.view.children)

    def show(self, *question: Any) -> None:
        """What the button looks for from now on; a search for something else ends with its present prediction."""
        self._wanted, before = question, self._wanted
        self.button.disabled = question[0] is None
        if self.page.value and before != question:
            self.page.value = page("words", words="Found before the last change; the button looks again.")

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[Answer]:
        question, card, asked = (recipe, gpu, limit_bytes), GPUS.get(gpu), list[Recipe]()
        title, capability = (card.title, card.compute_capability) if card else (THIS_CPU, None)

        def ask(wanted: Recipe) -> Prediction:
            if self._wanted != question:
                raise InterruptedError
            self._put((page("plan", done=len(asked), limit=limit_bytes), ()))
            asked.append(wanted)
            return self.predictor(wanted, gpu)

        try:
            recipe, offered = resolved(recipe, [gpu]), families(capability)
            with SEARCH:
                found = Search(recipe, limit_bytes, ask, families=offered, predicted_for=title).plan()
        except InterruptedError:
            yield page("words", words="Stopped: the recipe, the card or its limit has changed."), ()
            return
        cards = [c for c in found.candidates or [found.closest] if c.changes]
        yield page("plan", found=found, more=len(cards[MOST:])), cards[:MOST]
