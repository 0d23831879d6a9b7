"""A small panel for a lesson: one technique's toggle and settings above the predicted memory."""

from typing import Any

import ipywidgets as w
from IPython.display import HTML, display

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Gauge
from workbench.widgets.playground import live_page


class toggle:  # noqa: N801 - read as a verb in a notebook: toggle(recipe, "lora")
    """Shows itself as the result of a cell; without a live page, as under papermill, its words and its bar.

    Args:
        recipe: the lesson's recipe.
        names: the techniques that can be switched; other settings stay as they are.
        gpu: what to predict for, at first.
    """

    def __init__(self, recipe: Recipe, *names: str, gpu: str = "h100") -> None:
        self.recipe, self.gauge = recipe, Gauge(gpu)
        self.form = RecipeForm(recipe, self._changed, names)
        switches = [self.form.toggles[name].view for name in sorted(names)]
        self.view = w.VBox([*switches, self.form.error, self.gauge.view])
        self._changed()

    def _changed(self) -> None:
        if not hasattr(self, "form"):
            return  # the form calls while it is being made
        try:
            self.gauge.show(self.form.recipe())
        except ConfigurationError:
            self.gauge.show(None)

    def _ipython_display_(self) -> Any:
        if live_page():
            display(self.view)
            return
        self.gauge.wait()
        display(HTML(self.gauge.page.value))
