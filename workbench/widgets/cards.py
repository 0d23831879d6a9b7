"""Changes that are predicted to fit, as cards: advice after an out-of-memory, and plans for the recipe as it is."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import ipywidgets as w

from workbench.advise.candidate import Candidate, rank
from workbench.advise.doctor import cause, diagnose, promising
from workbench.advise.plan import THIS_CPU, Search, families
from workbench.gpus.catalogue import GPUS
from workbench.journal.record import Record
from workbench.prediction.predict import Prediction, resolved
from workbench.recipe import Recipe
from workbench.widgets.light import HTML, Button, HBox, VBox
from workbench.widgets.pages import page, status
from workbench.widgets.part import SEARCH, Part

MOST = 6  # cards of one search

Choose = Callable[[Recipe], None]
Answer = str | tuple[str, Sequence[Candidate]]  # a page, and what becomes cards below it


class Cards(Part):
    """A page, and below it candidates that can be taken.

    Args:
        choose: called with the recipe that the user takes.
    """

    quiet_s = 0.0

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose
        self.candidates: Sequence[Candidate] = ()
        self.cards = HBox(_dom_classes=("wb-cards",))
        self.view.children = (*self.view.children, self.cards)

    def put(self, answer: Answer) -> None:
        if isinstance(answer, str):
            answer = answer, ()
        text, candidates = answer
        super().put(text)
        if candidates != self.candidates:  # a card that is the same stays, or a click on it could miss it
            self.candidates = candidates
            self.cards.children = [card(candidate, self.choose) for candidate in candidates]


def card(candidate: Candidate, choose: Choose) -> w.Widget:
    """What a candidate needs and costs, whether it fits, and a button that takes it."""
    style = "primary" if candidate.fits else ""
    take = Button(description=candidate.words, button_style=style)
    take.on_click(lambda _: choose(candidate.recipe))
    return VBox([take, HTML(page("card", candidate=candidate))], _dom_classes=("wb-card",))


class Advice(Cards):
    """After a run that ran out of memory: the cause at once, then each single change that is found to fit."""

    def answers(self, record: Record) -> Iterator[Answer]:
        predictor = cache(self.predict)
        changes: list[Candidate] = []
        with SEARCH:
            yield page("advice", cause=cause(record), looking="the recipe as it is", found=changes)
            names = promising(record, predictor)
            for name in names:
                text = page("advice", cause=cause(record), looking=name, found=changes)
                yield text, sorted(changes, key=rank)[:MOST]
                changes += diagnose(record, among=[name], predict=predictor).changes
            whole = diagnose(record, among=names, predict=predictor)
        closest = [whole.closest] if whole.closest else []
        yield page("advice", cause=whole.cause, whole=whole), whole.changes[:MOST] or closest


class MakeItFit(Cards):
    """The planner behind one button. What it found stays when the recipe changes, and is said to be older."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self._wanted: tuple[Any, ...] = (None,)
        self.button = Button(
            description="Make it fit",
            button_style="primary",
            tooltip="look for changes that fit",
        )
        self.button.on_click(self._look)
        self.view.children = (self.button, *self.view.children)

    def show(self, *question: Any) -> None:
        """What the button looks for from now on; a search for something else is given up."""
        if question == self._wanted:
            return
        self._wanted = question
        self.button.disabled = question[0] is None
        if self.is_working:
            self.stop()
            self.put(status("Stopped: the recipe, the card or its limit has changed."))
        elif self.page.value:
            self.page.value = status("Found before the last change; the button looks again.")

    def _look(self, _: object) -> None:
        super().show(*self._wanted)

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[Answer]:
        gpu_card = GPUS.get(gpu)
        predictions: list[Prediction] = []

        def predictor(wanted: Recipe) -> Prediction:
            self.give(page("plan", done=len(predictions), limit=limit_bytes))
            predictions.append(self.predict(wanted, gpu))
            return predictions[-1]

        with SEARCH:
            plan = Search(
                resolved(recipe, [gpu]),
                limit_bytes,
                predictor,
                families=families(gpu_card.compute_capability if gpu_card else None),
                predicted_for=gpu_card.title if gpu_card else THIS_CPU,
            ).plan()
        candidates = [candidate for candidate in plan.candidates or [plan.closest] if candidate.changes]
        yield page("plan", found=plan, more=len(candidates[MOST:])), candidates[:MOST]
