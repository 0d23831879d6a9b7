"""The savings of each technique: two predictions, with it and without, made while nobody waits for the gauge."""

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

# An offer compares two recipes, with a technique and without it. A string says why there is no comparison.
Offer = Candidate | str


class Savings(Background):
    """The thread that predicts the recipe with and without each technique, one technique after the other.

    Args:
        toggles: the techniques, by name.

    Attributes:
        offers: the offers since the last change of the recipe, by the technique's name.
        on_offer: is called after each offer, with the technique's name.
    """

    quiet_s = 0.7
    waits_for = (URGENT, SEARCH)

    def __init__(self, toggles: Mapping[str, TechniqueToggle]) -> None:
        super().__init__()
        self.predictor = predict_known
        self.toggles = toggles
        self.offers: dict[str, Offer] = {}
        self.on_offer: Callable[[str], object] = nothing

    def show(self, recipe: Recipe | None, limit: Limit) -> None:
        """Predict what each technique does to this recipe from now on; None: there is no valid one."""
        self.offers = {}
        if recipe is None:
            self.stop()
        else:
            self.ask(recipe, limit)

    def answers(self, recipe: Recipe, limit: Limit) -> Iterator[tuple[str, Offer]]:
        for name, toggle in self.toggles.items():
            try:
                offer = self._offer(recipe, toggle, limit)
            except InterruptedError:  # there is a newer question
                raise
            except Exception as error:
                # the next technique may have an answer
                offer = reason_of(error)
            yield name, offer

    def show_answer(self, answer: tuple[str, Offer]) -> None:
        name, offer = answer
        self.offers[name] = offer
        self.on_offer(name)

    def _offer(self, recipe: Recipe, toggle: TechniqueToggle, limit: Limit) -> Offer:
        """Compare two recipes, with the technique and without it.

        Raises ConfigurationError if technique and recipe do not go together, or cannot be predicted.
        """
        if toggle.box.disabled:
            return toggle.reason
        technique = toggle.technique()
        others = [other for other in recipe.techniques if other.name != technique.name]
        without = replace(recipe, techniques=tuple(others))
        having = recipe if toggle.box.value else recipe | technique
        before = self.predict(without, limit.gpu)
        after = self.predict(having, limit.gpu)
        # Two engines are not compared: predictions that come with the workbench were made on an emulated GPU,
        # which this machine may not have.
        if engine_words(before.source) != engine_words(after.source):
            before = predict(without, limit.gpu)
            after = predict(having, limit.gpu)
        baseline = Candidate(without, (), before, limit.have_bytes)
        return Candidate(having, (technique,), after, limit.have_bytes, baseline)
