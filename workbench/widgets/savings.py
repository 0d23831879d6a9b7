"""Beside each switch, what it saves: the difference of two predictions, made while nobody waits for the gauge."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from workbench.errors import ConfigurationError
from workbench.measure.categories import format_bytes
from workbench.predict.predict import Prediction, predict
from workbench.recipe import Recipe
from workbench.widgets.background import SEARCH, Newest, patient
from workbench.widgets.controls import TechniqueToggle
from workbench.widgets.gauge import Limit
from workbench.widgets.pages import small

QUIET_S = 0.7


class Savings:
    """Asks for the recipe with and without each technique, one after the other.

    Args:
        toggles: whose `saving` shows it.
        predictor: `predict`, or something that answers like it.
    """

    def __init__(
        self, toggles: Mapping[str, TechniqueToggle], predictor: Callable[..., Prediction] | None = None
    ) -> None:
        self.toggles, self.predictor = toggles, patient(predictor or predict, SEARCH)
        self.newest = Newest(self._answers, self._show, QUIET_S)

    def show(self, recipe: Recipe | None, limit: Limit) -> None:
        for toggle in self.toggles.values():
            toggle.saving.add_class("wb-old")
        self.newest.ask((recipe, limit))

    def _show(self, found: tuple[str, str]) -> None:
        name, words = found
        self.toggles[name].saving.value = words
        self.toggles[name].saving.remove_class("wb-old")

    def _answers(self, question: tuple[Recipe | None, Limit]) -> Iterator[tuple[str, str]]:
        recipe, limit = question
        for name, toggle in self.toggles.items():
            if recipe is None:
                return
            try:
                yield name, self._words(*_pair(recipe, toggle), limit)
            except Exception as error:  # of the recipe, or of the worker: the next switch may have an answer
                yield name, f"<details><summary>{small('not here')}</summary>{small(error)}</details>"

    def _words(self, without: Recipe, having: Recipe, limit: Limit) -> str:
        before, after = (sum(limit.parts_of(self.predictor(one, limit.gpu)).values()) for one in (without, having))
        sign = "−" if after < before else "+" if after > before else "±"
        return small(f"{sign}{format_bytes(abs(after - before))}")


def _pair(recipe: Recipe, toggle: TechniqueToggle) -> tuple[Recipe, Recipe]:
    """The recipe without the technique, and with it. Raises ConfigurationError where they do not go together."""
    if toggle.box.value:
        others = tuple(t for t in recipe.techniques if t.name != toggle.cls.name)
        return replace(recipe, techniques=others), recipe
    if toggle.box.disabled:
        raise ConfigurationError(f"{toggle.cls.name}: it does not go with this recipe.")
    return recipe, recipe | toggle.cls(**toggle.form.values())
