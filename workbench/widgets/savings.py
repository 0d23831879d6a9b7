"""What each technique would do to the recipe, by two predictions each, made while nobody waits for the gauge."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from workbench.advise.candidate import Candidate
from workbench.lessons.cards import predict_known
from workbench.prediction.predict import predict
from workbench.prediction.prediction import engine_words
from workbench.recipe import Recipe
from workbench.widgets.controls import TechniqueToggle
from workbench.widgets.gauge import Limit, nothing
from workbench.widgets.part import SEARCH, URGENT, Background, reason_of

# the recipe with the technique, compared with the one without; or why there is none
Offer = Candidate | str


class Savings(Background):
    """Asks for the recipe with and without each technique, one after the other.

    Args:
        toggles: the techniques, by name.

    Attributes:
        offers: by name, of those that were asked since the last change.
        told: called after each answer, with the technique's name.
        ended: called when all are known.
    """

    quiet_s = 0.7
    waits_for = (URGENT, SEARCH)

    def __init__(self, toggles: Mapping[str, TechniqueToggle]) -> None:
        super().__init__()
        self.predictor = predict_known
        self.toggles = toggles
        self.offers: dict[str, Offer] = {}
        self.told: Callable[[str], object] = nothing
        self.ended: Callable[[], object] = nothing

    def show(self, recipe: Recipe | None, limit: Limit) -> None:
        """What each technique does to this recipe from now on; None: there is no valid one."""
        self.offers = {}
        if recipe is None:
            self.stop()
        else:
            self.ask(recipe, limit)

    def answers(self, recipe: Recipe, limit: Limit) -> Iterator[tuple[str, Offer] | None]:
        for name, toggle in self.toggles.items():
            try:
                offer = self._offer(recipe, toggle, limit)
            except InterruptedError:  # there is a newer question
                raise
            except Exception as error:  # of the recipe, or of the worker: the next technique may have an answer
                offer = reason_of(error)
            yield name, offer
        yield None

    def put(self, answer: tuple[str, Offer] | None) -> None:
        if answer is None:
            self.ended()
        else:
            name, offer = answer
            self.offers[name] = offer
            self.told(name)

    def _offer(self, recipe: Recipe, toggle: TechniqueToggle, limit: Limit) -> Offer:
        """Raises ConfigurationError where technique and recipe do not go together, or cannot be predicted."""
        if toggle.box.disabled:
            return toggle.reason
        technique = toggle.technique()
        others = [other for other in recipe.techniques if other.name != technique.name]
        without = replace(recipe, techniques=tuple(others))
        having = recipe if toggle.box.value else recipe | technique
        before = self.predict(without, limit.gpu)
        after = self.predict(having, limit.gpu)
        # both by one engine: what comes with the workbench was made on an emulated GPU, and here there may be none
        if engine_words(before.source) != engine_words(after.source):
            before = predict(without, limit.gpu)
            after = predict(having, limit.gpu)
        baseline = Candidate(without, (), before, limit.have_bytes)
        return Candidate(having, (technique,), after, limit.have_bytes, baseline)
