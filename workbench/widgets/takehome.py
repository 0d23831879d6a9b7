"""The chosen recipe to take along, as a script, a file or a command; and recipes from elsewhere, brought here."""

import base64
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import ipywidgets as w

from workbench.errors import WorkbenchError
from workbench.export.bring import read_settings
from workbench.export.script import portable, script
from workbench.export.written import as_command, as_toml
from workbench.recipe import Recipe
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import alarm, page

FORMS: dict[str, tuple[str, Callable[[Recipe], str]]] = {  # the name of the file, and what is in it
    "Hugging Face script": ("train.py", script),
    "TRL script": ("train_trl.py", partial(script, flavour="trl")),
    "recipe file (TOML)": ("recipe.toml", as_toml),
    "JSON": ("recipe.json", lambda recipe: json.dumps(recipe.to_dict(), indent=1, ensure_ascii=False)),
    "command": ("train.sh", as_command),
}


class TakeHome:
    """Shows the recipe in one of several forms, to be copied or downloaded, and reads recipes and others' settings.

    Args:
        recipe: gives the recipe of the moment; may raise ConfigurationError.
        choose: called with a recipe that was brought.
    """

    def __init__(self, recipe: Callable[[], Recipe], choose: Callable[[Recipe], None]) -> None:
        self.recipe, self.choose = recipe, choose
        what = "a recipe or a record of the workbench, TrainingArguments as JSON, YAML of LLaMA-Factory or axolotl"
        self.form = w.Dropdown(options=list(FORMS), description="as")
        self.pasted = w.Textarea(placeholder=what, tooltip=what, rows=12, layout=w.Layout(width="auto"))
        self.use = w.Button(description="Use it", tooltip="set the panel to what the text says")
        self.page, self.answer = HTML(), HTML()
        bring = VBox([HTML("<b>Bring</b>"), self.pasted, self.use, self.answer])
        self.view = VBox([self.form, self.page, bring])
        self.form.observe(lambda _: self.refresh(), names="value")
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

    def _bring(self) -> None:
        base = None  # where the form cannot be used
        with suppress(WorkbenchError):
            base = self.recipe()
        try:
            brought = read_settings(self.pasted.value, base)
            self.choose(brought.recipe)
        except WorkbenchError as error:
            self.answer.value = alarm(f"{error} Nothing was changed.")
        else:
            self.answer.value = page("brought", brought=brought)
            self.refresh()
