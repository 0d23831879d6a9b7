"""What the parts of the panel share: each is asked after every change and answers as a page, and perhaps with cards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ipywidgets as w

from workbench.advise.candidate import Candidate, Predictor
from workbench.errors import ConfigurationError, WorkbenchError
from workbench.predict.predict import predict
from workbench.recipe import Recipe
from workbench.widgets.background import Newest, patient
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import page

Answer = tuple[str, Sequence[Candidate]]  # a page, and what becomes cards below it
Choose = Callable[[Recipe], None]


class Part:
    """Stands on a tab. A subclass says in `answers(*question)` what it shows, each answer more than the one before.

    Args:
        choose: called with the recipe that the user takes.
        predictor: `predict`, or something that answers like it.
    """

    quiet_s: float = 0.7  # the gauge's own prediction comes first
    answers: Callable[..., Iterator[Answer]]

    def __init__(self, choose: Choose, predictor: Predictor | None = None) -> None:
        self.choose, self.predictor, self.page = choose, patient(predictor or predict), HTML()
        self.cards, self._made = w.Box(_dom_classes=("wb-cards",)), list[Card]()
        self.view = VBox([self.page, self.cards], _dom_classes=("wb-part",))
        self.newest = Newest(self._told, self._put, self.quiet_s)

    def show(self, *question: Any) -> None:
        """Answer this from now on: a recipe (None: there is no valid one), a GPU's name or "cpu", and what reserved
        memory and context may be together, in bytes. Returns at once."""
        self.view.add_class("wb-old")  # dimmed, until there is something newer
        self.newest.ask(question)

    def _told(self, question: tuple[Any, ...]) -> Iterator[Answer]:
        """The answers; whatever is raised becomes words, or the thread would end and the part stand still for good."""
        try:
            if question[0] is None:
                raise ConfigurationError("The recipe cannot be used as it is: mend what its form says.")
            yield from self.answers(*question)
        except Exception as error:
            fault = "" if isinstance(error, WorkbenchError) else f"no answer, a fault here: {type(error).__name__} "
            yield page("words", alarm=f"{fault}{error}"), ()

    def _put(self, answer: Answer) -> None:
        self.page.value, candidates = answer
        self._made += [Card(self.choose) for _ in candidates[len(self._made) :]]
        for card, candidate in zip(self._made, candidates, strict=False):
            card.show(candidate)
        self.cards.children = [card.view for card in self._made[: len(candidates)]]
        self.view.remove_class("wb-old")


class Card:
    """A candidate: what it needs and costs, whether it fits, and a button that takes it."""

    def __init__(self, choose: Choose) -> None:
        self.take, self.words = w.Button(), HTML()
        self.take.on_click(lambda _: choose(self.candidate.recipe))
        self.view = VBox([self.take, self.words], _dom_classes=("wb-card",))

    def show(self, candidate: Candidate) -> None:
        self.candidate, self.words.value = candidate, page("card", candidate=candidate)
        self.take.description, self.take.button_style = candidate.words, "primary" if candidate.fits else ""
