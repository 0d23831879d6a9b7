"""The chosen recipe to take along, as a script, a file or a command; and recipes from elsewhere, brought here."""

import base64
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ipywidgets as w

from workbench.errors import WorkbenchError
from workbench.export.bring import LIMIT, read_settings, recipe_file
from workbench.export.script import portable, script
from workbench.recipe import Recipe
from workbench.widgets.pages import alarm, page

FORMS: dict[str, tuple[str, Callable[[Recipe], str]]] = {  # the name of the file, and what is in it
    "Hugging Face script": ("train.py", script),
    "recipe file (TOML)": ("recipe.toml", recipe_file),
    "JSON": ("recipe.json", lambda recipe: json.dumps(recipe.to_dict(), indent=1, ensure_ascii=False)),
    "command": ("train.sh", Recipe.command),
}


class TakeHome:
    """Shows the recipe in one of several forms, to be copied or downloaded, and reads recipes and others' settings.

    Args:
        recipe: gives the recipe of the moment; may raise ConfigurationError.
        choose: called with a recipe that was brought.
    """

    def __init__(self, recipe: Callable[[], Recipe], choose: Callable[[Recipe], None]) -> None:
        self.recipe, self.choose = recipe, choose
        self.last: Recipe | None = None  # that could be used
        what = "a recipe or a record of the workbench, TrainingArguments as JSON, YAML of LLaMA-Factory or axolotl"
        self.form = w.Dropdown(options=list(FORMS), description="as")
        self.pasted = w.Textarea(placeholder=what, tooltip=what, rows=12, layout=w.Layout(width="auto"))
        self.upload = w.FileUpload(description="File", tooltip=what, accept=".toml,.json,.yaml,.yml")
        self.use = w.Button(description="Use it", tooltip="set the panel to what the text says")
        self.page, self.answer = w.HTML(), w.HTML()
        bring = w.VBox([w.HTML("<b>Bring</b>"), self.pasted, w.HBox([self.upload, self.use]), self.answer])
        self.view = w.VBox([self.form, self.page, bring])
        self.form.observe(lambda _: self.refresh(), names="value")
        self.upload.observe(self._open, names="value")
        self.use.on_click(lambda _: self._bring())

    def refresh(self) -> None:
        """Write the recipe of the moment."""
        name, write = FORMS[self.form.value]
        try:
            recipe = self.recipe()
            text, moved = portable(recipe, write(recipe))
        except WorkbenchError as error:
            self.page.value = alarm(error)
            return
        data = base64.b64encode(text.encode()).decode()
        self.page.value = page("takehome", name=name, data=data, text=text, moved=moved)

    def _open(self, change: Any) -> None:
        for file in change["new"]:
            self.pasted.value = bytes(file["content"][: LIMIT + 1]).decode("utf-8-sig", errors="replace")

    def _bring(self) -> None:
        with suppress(WorkbenchError):
            self.last = self.recipe()
        try:
            brought = read_settings(self.pasted.value, self.last)
            self.choose(brought.recipe)
        except WorkbenchError as error:
            self.answer.value = alarm(f"{error} Nothing was changed.")
        else:
            self.answer.value = page("brought", brought=brought)
            self.refresh()
