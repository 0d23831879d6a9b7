"""Beside each switch, what it saves: the difference of two predictions, made while nobody waits for the gauge."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.widgets.controls import TechniqueToggle
from workbench.widgets.pages import small
from workbench.widgets.part import SEARCH, URGENT, Background


class Savings(Background):
    """Asks for the recipe with and without each technique, one after the other.

    Args:
        toggles: whose `saving` shows it.
    """

    quiet_s = 0.7
    waits_for = (URGENT, SEARCH)

    def __init__(self, toggles: Mapping[str, TechniqueToggle]) -> None:
        super().__init__()
        self.toggles = toggles

    def show(self, recipe: Recipe | None, gpu: str) -> None:
        """What each switch saves of this recipe from now on; None: there is no valid one."""
        for toggle in self.toggles.values():
            toggle.saving.add_class("wb-old")
        if recipe is None:
            self.stop()
        else:
            self.ask(recipe, gpu)

    def answers(self, recipe: Recipe, gpu: str) -> Iterator[tuple[TechniqueToggle, str]]:
        for toggle in self.toggles.values():
            try:
                text = small(self._difference(recipe, toggle, gpu))
            except Exception as error:  # of the recipe, or of the worker: the next switch may have an answer
                text = f"<details><summary>{small('not here')}</summary>{small(error)}</details>"
            yield toggle, text

    def put(self, answer: tuple[TechniqueToggle, str]) -> None:
        toggle, text = answer
        toggle.saving.value = text
        toggle.saving.remove_class("wb-old")

    def _difference(self, recipe: Recipe, toggle: TechniqueToggle, gpu: str) -> str:
        """In words. Raises ConfigurationError where technique and recipe do not go together."""
        if toggle.box.disabled:
            raise ConfigurationError(f"{toggle.cls.name}: it does not go with this recipe.")
        others = [technique for technique in recipe.techniques if technique.name != toggle.cls.name]
        without = replace(recipe, techniques=tuple(others))
        having = recipe if toggle.box.value else recipe | toggle.technique()
        before = self.predict(without, gpu).need_bytes
        after = self.predict(having, gpu).need_bytes
        sign = "±"
        if after < before:
            sign = "−"
        elif after > before:
            sign = "+"
        return f"{sign}{format_bytes(abs(after - before))}"
