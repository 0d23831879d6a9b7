"""The part "Take the script home": the chosen recipe as a script, a file or a command."""

import base64
from collections.abc import Callable, Iterator
from functools import partial

from workbench.base.errors import WorkbenchError
from workbench.export.script import portable, script
from workbench.recipe import Recipe, as_command, as_toml
from workbench.widgets.light import Dropdown
from workbench.widgets.pages import page
from workbench.widgets.part import Part

# each form: the name of its file, and the function that writes it
FORMS: dict[str, tuple[str, Callable[[Recipe], str]]] = {
    "Hugging Face script": ("train.py", script),
    "TRL script": ("train_trl.py", partial(script, flavour="trl")),
    "recipe file (TOML)": ("recipe.toml", as_toml),
    "command": ("train.sh", as_command),
}


class TakeHome(Part):
    """The part that shows the recipe in one of several forms, to be copied or downloaded, and the files it needs.

    Args:
        recipe: returns the recipe of the moment; may raise ConfigurationError.
    """

    def __init__(self, recipe: Callable[[], Recipe]) -> None:
        super().__init__()
        self.recipe = recipe
        self.form = Dropdown(options=list(FORMS), description="as")
        self.view.children = (self.form, *self.view.children)
        self.form.observe(self.show, names="value")

    def show(self, *_: object) -> None:
        """Write the recipe of the moment. Until that is done, the older text is dimmed."""
        try:
            super().show(self.recipe(), self.form.value)
        except WorkbenchError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe, form: str) -> Iterator[str]:
        file_name, write = FORMS[form]
        text, beside = portable(recipe, write(recipe))
        data = base64.b64encode(text.encode()).decode()
        yield page("takehome", name=file_name, data=data, text=text, moved=beside)
