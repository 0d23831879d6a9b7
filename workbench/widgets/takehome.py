"""The chosen recipe to take along: a plain script, JSON, or the command that runs it."""

import json
from collections.abc import Callable

import ipywidgets as w

from workbench.errors import WorkbenchError
from workbench.export.script import script
from workbench.recipe import Recipe


class TakeHome:
    """Shows one of three forms of the recipe, to be copied.

    Args:
        recipe: gives the recipe of the moment; may raise ConfigurationError.
    """

    FORMS = ("Hugging Face script", "JSON", "command")

    def __init__(self, recipe: Callable[[], Recipe]) -> None:
        self.recipe = recipe
        self.form = w.Dropdown(options=self.FORMS, description="as")
        self.text = w.Textarea(
            description="copy", layout=w.Layout(width="100%", height="32em"), tooltip="the recipe, to be copied"
        )
        self.view = w.VBox([self.form, self.text])
        self.form.observe(lambda _: self.refresh(), names="value")

    def refresh(self) -> None:
        try:
            self.text.value = self._written(self.recipe())
        except WorkbenchError as error:
            self.text.value = f"# {error}"

    def _written(self, recipe: Recipe) -> str:
        if self.form.value == "JSON":
            return json.dumps(recipe.to_dict(), indent=1)
        return recipe.command() if self.form.value == "command" else script(recipe)
