"""Dataclass fields as ipywidgets: what a setting means, its range and its choices decide the control."""

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import ipywidgets as w

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.settings import described, kind, optional, parse_settings
from workbench.techniques import REGISTRY, Technique
from workbench.widgets.pages import escaped

WIDE = {"description_width": "11.5em"}
LARGEST = 2**31 - 1


def control(field: Field[Any]) -> w.Widget:
    """An input for one setting; its tooltip says what the setting is and what it accepts."""
    meta, words = field.metadata, field.name.replace("_", " ")
    common = {
        "description": words,
        "tooltip": f"{meta['help']} ({described(field)})",
        "style": WIDE,
        "layout": w.Layout(width="20em"),
    }
    if meta["choices"]:
        return w.Dropdown(options=list(meta["choices"]), value=field.default, **common)
    if kind(field) == "bool":
        beside = {"style": {"description_width": "initial"}, "layout": w.Layout(width="auto", margin="0 0 0 6em")}
        return w.Checkbox(value=field.default, indent=False, **{**common, **beside})
    if kind(field) == "int" and not optional(field):
        low, high = meta["minimum"], meta["maximum"]
        return w.BoundedIntText(
            value=field.default, min=-LARGEST if low is None else int(low),
            max=LARGEST if high is None else min(int(high), LARGEST), **common,
        )  # fmt: skip
    empty = "customary" if optional(field) else ""
    return w.Text(value="" if field.default is None else str(field.default), placeholder=empty, **common)


class Form:
    """Controls for the settings of one dataclass.

    Args:
        cls: its fields made by `setting` get a control each.
        changed: called without arguments after every change.
    """

    def __init__(self, cls: type[Any], changed: Callable[[], None], names: tuple[str, ...] | None = None) -> None:
        self.cls = cls
        chosen = [f for f in fields(cls) if "help" in f.metadata and (names is None or f.name in names)]
        self.controls = {field.name: control(field) for field in chosen}
        for made in self.controls.values():
            made.observe(lambda _: changed(), names="value")

    def values(self) -> dict[str, Any]:
        """As the dataclass takes them. Raises ConfigurationError for a text that is not of the setting's type."""
        texts = {name: str(made.value) for name, made in self.controls.items()}
        return parse_settings(self.cls, texts, getattr(self.cls, "name", "recipe"))

    def fill(self, values: dict[str, Any]) -> None:
        for name, made in self.controls.items():
            value = values[name]
            made.value = ("" if value is None else str(value)) if isinstance(made, w.Text) else value


class TechniqueToggle:
    """A checkbox with the technique's settings below it, which show while it is on; greyed with the reason if the
    technique does not go together with what is chosen."""

    def __init__(self, cls: type[Technique], changed: Callable[[], None]) -> None:
        self.cls = cls
        self.form = Form(cls, changed)
        self.box = w.Checkbox(
            description=cls.title, tooltip=f"{cls.title}. Costs: {cls.costs}. Same loss? {cls.numerics}.", indent=False,
            layout=w.Layout(width="auto"),
        )  # fmt: skip
        self.reason = w.HTML()
        self.settings = w.VBox(list(self.form.controls.values()), layout=w.Layout(display="none", margin="0 0 0 1.5em"))
        self.view = w.VBox([self.box, self.reason, self.settings])
        self.box.observe(self._show_settings, names="value")
        self.box.observe(lambda _: changed(), names="value")

    def _show_settings(self, _: Any) -> None:
        self.settings.layout.display = None if self.box.value else "none"

    def technique(self) -> Technique | None:
        """The technique if it is switched on. Raises ConfigurationError for a setting out of range."""
        return self.cls(**self.form.values()) if self.box.value else None

    def allow(self, reason: str) -> None:
        """Let it be switched on, or grey it and say why not."""
        self.box.disabled = bool(reason) and not self.box.value
        self.reason.value = f'<small style="margin-left: 1.5em">{escaped(reason)}</small>' if reason else ""

    def show(self, technique: Technique | None) -> None:
        if technique is not None:
            self.form.fill(technique.settings())
        self.box.value = technique is not None


class RecipeForm:
    """A whole recipe: its own settings, and a toggle for every technique there is."""

    MAIN = ("model", "corpus", "effective_batch_size", "sequence_length", "steps")

    def __init__(self, recipe: Recipe, changed: Callable[[], None], techniques: tuple[str, ...] | None = None) -> None:
        self._changed, self._filling = changed, False
        self.form = Form(Recipe, self._react)
        known = REGISTRY if techniques is None else {name: REGISTRY[name] for name in techniques}
        self.toggles = {name: TechniqueToggle(cls, self._react) for name, cls in sorted(known.items())}
        rest = [made for name, made in self.form.controls.items() if name not in self.MAIN]
        more = w.Accordion([w.VBox(rest)], titles=("More settings",), selected_index=None)
        main = [self.form.controls[name] for name in self.MAIN]
        self.error = w.HTML()
        toggles = w.VBox([toggle.view for toggle in self.toggles.values()])
        self.view = w.VBox([*main, more, w.HTML("<b>Techniques</b>"), toggles, self.error])
        self.show(recipe)

    def recipe(self) -> Recipe:
        """Raises ConfigurationError if the settings cannot be used, or the techniques not together."""
        chosen = (toggle.technique() for toggle in self.toggles.values())
        return Recipe(**self.form.values(), techniques=tuple(t for t in chosen if t is not None))

    def show(self, recipe: Recipe) -> None:
        """Set every control to a recipe."""
        self._filling = True
        self.form.fill({name: getattr(recipe, name) for name in self.form.controls})
        chosen = {technique.name: technique for technique in recipe.techniques}
        for name, toggle in self.toggles.items():
            toggle.show(chosen.get(name))
        self._filling = False
        self._react()

    def _react(self) -> None:
        if self._filling:
            return
        self._explain()
        self._changed()

    def _explain(self) -> None:
        """Grey what cannot be added to the recipe, and say what is wrong with the recipe as it is."""
        try:
            recipe = self.recipe()
        except ConfigurationError as error:
            self.error.value = f'<p role="alert">⚠ {escaped(str(error))}</p>'
            return
        self.error.value = ""
        for toggle in self.toggles.values():
            toggle.allow("" if toggle.box.value else _objection(recipe, toggle.cls))


def _objection(recipe: Recipe, cls: type[Technique]) -> str:
    """Why a technique with its default settings cannot be added."""
    try:
        recipe | cls()
    except ConfigurationError as error:
        return str(error).removeprefix("recipe: ")
    return ""
