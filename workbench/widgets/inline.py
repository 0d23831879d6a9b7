"""A small panel for a lesson: one technique's toggle and settings above the predicted memory."""

from contextlib import suppress
from typing import Any

from IPython.display import HTML, display

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Gauge
from workbench.widgets.light import VBox
from workbench.widgets.pages import live_page
from workbench.widgets.savings import Savings


class toggle:  # noqa: N801 - read as a verb in a notebook: toggle(recipe, "lora")
    """Shows itself as the result of a cell; without a live page, as under papermill, its words and its bar.

    Args:
        recipe: the lesson's recipe.
        names: the techniques that can be switched; other settings stay as they are.
        gpu: what to predict for, at first.
    """

    def __init__(self, recipe: Recipe, *names: str, gpu: str = "h100") -> None:
        self.form: RecipeForm | None = None  # while it is made, its parts ask already
        self.gauge = Gauge(gpu, changed=self._changed)
        form = RecipeForm(recipe, self._changed, names)
        switches = [form.toggles[name].view for name in sorted(names)]
        self.savings = Savings(form.toggles)
        self.view = VBox([*switches, form.error, self.gauge.view])
        self.form = form
        self._changed()

    def _changed(self) -> None:
        if self.form is not None:
            self.form.suit(self.gauge.capability)
            self.gauge.show(recipe := self.form.valid())
            with suppress(ConfigurationError):  # the gauge says so
                self.savings.show(recipe, self.gauge.limit)

    def _ipython_display_(self) -> Any:
        if live_page():
            display(self.view)
            return
        self.gauge.newest.wait()
        display(HTML(self.gauge.page.value))
