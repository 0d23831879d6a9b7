"""The chosen recipe to take along, as a script, a file or a command; and recipes from elsewhere, brought here."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import ipywidgets as w

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.paths import aside, put_in_place
from workbench.export.bring import read_settings
from workbench.export.script import portable, script
from workbench.export.written import as_command, as_toml
from workbench.recipe import Recipe
from workbench.texts.readers import split_name
from workbench.widgets.controls import show_if
from workbench.widgets.light import HTML, Button, Dropdown
from workbench.widgets.pages import alarm, page, status
from workbench.widgets.part import Part


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


class TakeHome(Part):
    """Shows the recipe in one of several forms, to be copied or downloaded, and reads recipes and others' settings.

    Args:
        recipe: returns the recipe of the moment; may raise ConfigurationError.
        choose: called with a recipe that was brought.
    """

    quiet_s = 0.0

    def __init__(self, recipe: Callable[[], Recipe], choose: Callable[[Recipe], None]) -> None:
        super().__init__()
        self.recipe = recipe
        self.choose = choose
        self.form = Dropdown(options=list(FORMS), description="as")
        self.pack = Button(description="Put it all into one zip", tooltip="the text and the model with it")
        self.packed = HTML()
        self.pasted = w.Textarea(description="settings", placeholder=READABLE, rows=12, _dom_classes=("wb-wide",))
        self.use = Button(description="Use it", tooltip="set the panel to what the text says")
        self.answer = HTML()
        bring = [HTML("<b>Bring</b>"), self.pasted, self.use, self.answer]
        self.view.children = (self.form, *self.view.children, self.pack, self.packed, *bring)
        self._written: tuple[str, str, Mapping[str, str]] = ("", "", {})
        show_if(False, self.pack)
        self.form.observe(self.show, names="value")
        self.pack.on_click(self._pack)
        self.use.on_click(self._bring)

    def show(self, *_: object) -> None:
        """Write the recipe of the moment; until that is done, what is shown is dimmed."""
        self.packed.value = ""
        show_if(False, self.pack)
        try:
            super().show(self.recipe(), self.form.value)
        except WorkbenchError as error:
            self.refuse(error)

    def answers(self, recipe: Recipe, form: str) -> Iterator[str]:
        file_name, write = FORMS[form]
        text, moved = portable(recipe, write(recipe))
        self.go_on()
        self._written = (file_name, text, moved)
        data = base64.b64encode(text.encode()).decode()
        yield page("takehome", name=file_name, data=data, text=text, moved=moved)
        show_if(bool(moved), self.pack)

    def _pack(self, _: object) -> None:
        try:
            path = zipped(self.recipe().id, *self._written)
        except (OSError, WorkbenchError) as error:
            self.packed.value = alarm(error)
        else:
            self.packed.value = status(f"Written: {path} ({format_bytes(path.stat().st_size)}).")

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


def zipped(name: str, file_name: str, text: str, moved: Mapping[str, str]) -> Path:
    """Write a zip into the working folder: the file, and beside it what it names, under the names that it has there.

    Raises:
        ConfigurationError: two of them would have one name.
        UnavailableError: there is no room.
    """
    if len({file_name, *moved.values()}) <= len(moved):
        raise ConfigurationError(f"zip: {', '.join(moved)} have one name. Rename one of them.")
    zip_name = f"{Path(file_name).stem}-{name}.zip"
    with aside(Path.cwd(), f"zip: {zip_name}") as part:
        with ZipFile(part, "w", ZIP_DEFLATED) as archive:
            archive.writestr(file_name, text)
            for original, short in moved.items():
                location, options = split_name(original)
                for file in files_of(Path(location)):
                    archive.write(file, Path(short.removesuffix(options)) / file.relative_to(location))
        return put_in_place(part, zip_name)


def files_of(path: Path) -> list[Path]:
    """A file itself, or all that a folder holds but what is hidden."""
    if not path.is_dir():
        return [path]
    files = []
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            files.append(file)
    return files
