"""The chosen recipe to take along, as a script, a file or a command; and recipes from elsewhere, brought here."""

import base64
import json
from collections.abc import Callable
from functools import partial

import ipywidgets as w

from workbench.base.errors import WorkbenchError
from workbench.export.bring import read_settings
from workbench.export.script import portable, script
from workbench.export.written import as_command, as_toml
from workbench.recipe import Recipe
from workbench.widgets.light import HTML, Button, Dropdown, VBox
from workbench.widgets.pages import alarm, page


def as_json(recipe: Recipe) -> str:
    return json.dumps(recipe.to_dict(), indent=1, ensure_ascii=False)


FORMS: dict[str, tuple[str, Callable[[Recipe], str]]] = {  # the name of the file, and what writes it
    "Hugging Face script": ("train.py", script),
    "TRL script": ("train_trl.py", partial(script, flavour="trl")),
    "recipe file (TOML)": ("recipe.toml", as_toml),
    "JSON": ("recipe.json", as_json),
    "command": ("train.sh", as_command),
}
READABLE = "a recipe or a record of the workbench, TrainingArguments as JSON, YAML of LLaMA-Factory or axolotl"


class TakeHome:
    """Shows the recipe in one of several forms, to be copied or downloaded, and reads recipes and others' settings.

    Args:
        recipe: returns the recipe of the moment; may raise ConfigurationError.
        choose: called with a recipe that was brought.
    """

    def __init__(self, recipe: Callable[[], Recipe], choose: Callable[[Recipe], None]) -> None:
        self.recipe = recipe
        self.choose = choose
        self.form = Dropdown(options=list(FORMS), description="as")
        self.pasted = w.Textarea(placeholder=READABLE, tooltip=READABLE, rows=12, _dom_classes=("wb-wide",))
        self.use = Button(description="Use it", tooltip="set the panel to what the text says")
        self.page = HTML()
        self.answer = HTML()
        self.view = VBox([self.form, self.page, HTML("<b>Bring</b>"), self.pasted, self.use, self.answer])
        self.form.observe(self.show, names="value")
        self.use.on_click(self._bring)

    def show(self, *_: object) -> None:
        """Write the recipe of the moment."""
        file_name, write = FORMS[self.form.value]
        try:
            recipe = self.recipe()
            text, moved = portable(recipe, write(recipe))
        except WorkbenchError as error:
            self.page.value = alarm(error)
            return
        data = base64.b64encode(text.encode()).decode()
        self.page.value = page("takehome", name=file_name, data=data, text=text, moved=moved)

    def _bring(self, _: object) -> None:
        try:
            base = self.recipe()
        except WorkbenchError:
            base = None  # the form cannot be used, and what is brought is the way out
        try:
            brought = read_settings(self.pasted.value, base)
            self.choose(brought.recipe)
        except WorkbenchError as error:
            self.answer.value = alarm(f"{error} Nothing was changed.")
        else:
            self.answer.value = page("brought", brought=brought)
            self.show()
