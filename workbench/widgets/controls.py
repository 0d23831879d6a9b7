"""Dataclass fields as ipywidgets: what a setting means, its range and its choices decide the control."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import Field, fields, replace
from typing import Any

import ipywidgets as w

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.recipe import Recipe
from workbench.settings import described, kind, optional, parse_settings
from workbench.techniques import REGISTRY, Technique
from workbench.texts.corpus import embedded
from workbench.widgets.light import HTML, LABEL, Checkbox, HBox, VBox, shared_look
from workbench.widgets.pages import alarm, small

TOOLTIP = "tooltip" if hasattr(w.Text, "tooltip") else "description_tooltip"  # ipywidgets 7, as on Colab
WIDE = {"description_width": "10.5em"}
OFFERED = {"model": [EMBEDDED, *PUBLISHED, *(RANDOM + size for size in PUBLISHED)], "corpus": embedded()}
GROUPS = {
    "Gradients, optimizer states, weights": (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES),
    "Activations": (Category.ACTIVATIONS,),
    "Logits and loss": (Category.LOGITS_AND_LOSS,),
}
ELSEWHERE = "Data, kernels, allocator"


def control(field: Field[Any]) -> w.Widget:
    """An input for one setting; its tooltip says what the setting is and what it accepts.

    What is typed counts when Enter is pressed or the field is left. Numbers are texts: an input for numbers would
    change what it does not like without a word.
    """
    meta = field.metadata
    common: dict[str, Any] = {"description": field.name.replace("_", " "), TOOLTIP: help_of(field)}
    if kind(field) == "bool":
        beside = shared_look(w.Layout, width="auto", margin="0 0 0 6em")
        return _shown(w.Checkbox, LABEL, beside, value=field.default, indent=False, **common)
    wide = shared_look(w.Layout, width="20em")
    if meta["choices"]:
        return _shown(w.Dropdown, WIDE, wide, options=list(meta["choices"]), value=field.default, **common)
    common |= {"value": "" if field.default is None else str(field.default), "continuous_update": False}
    if field.name in OFFERED:
        return _shown(w.Combobox, WIDE, wide, options=OFFERED[field.name], ensure_option=False, **common)
    return _shown(w.Text, WIDE, wide, placeholder="customary" if optional(field) else "", **common)


def _shown(cls: type[w.Widget], style: dict[str, str], layout: w.Layout, **state: Any) -> w.Widget:
    return cls(style=shared_look(cls.style.klass, **style), layout=layout, **state)


def help_of(field: Field[Any]) -> str:
    return f"{field.metadata['help']} ({described(field)})"


class Form:
    """Controls for the settings of one dataclass.

    Args:
        cls: its fields made by `setting` get a control each.
        changed: called without arguments after every change.
    """

    def __init__(self, cls: type[Any], changed: Callable[[], None]) -> None:
        self.cls = cls
        self.fields = {field.name: field for field in fields(cls) if "help" in field.metadata}
        self.controls = {name: control(field) for name, field in self.fields.items()}
        for made in self.controls.values():
            made.observe(lambda _: changed(), names="value")

    def explained(self, *names: str) -> list[w.Widget]:
        """The controls of these fields, each with its help below it."""
        return [
            part for n in names or self.controls for part in (self.controls[n], HTML(small(help_of(self.fields[n]))))
        ]

    def values(self) -> dict[str, Any]:
        """As the dataclass takes them. Raises ConfigurationError for a text that is not of the setting's type."""
        texts = {name: str(made.value).strip() for name, made in self.controls.items()}
        return parse_settings(self.cls, texts, getattr(self.cls, "name", "recipe"))

    def fill(self, values: dict[str, Any]) -> None:
        for name, made in self.controls.items():
            value = values[name]
            made.value = ("" if value is None else str(value)) if isinstance(made, w.Text) else value


class TechniqueToggle:
    """A checkbox with what the technique would save, what it costs, and its settings, which show while it is on;
    greyed with the reason where the technique does not go together with what is chosen."""

    def __init__(self, cls: type[Technique], changed: Callable[[], None]) -> None:
        self.cls = cls
        self._last: Technique | None = None  # as it was when it was on
        self.form = Form(cls, changed)
        self.box = Checkbox(
            description=cls.title, indent=False, layout=shared_look(w.Layout, width="auto"),
            **{TOOLTIP: f"{cls.title}. Costs: {cls.costs}. Same loss? {cls.numerics}."},
        )  # fmt: skip
        self.saving, self.reason = HTML(), HTML()
        self.settings = VBox(layout=w.Layout(display="none", margin="0 0 0 1.5em"))
        self.view = VBox([HBox([self.box, self.saving]), self.reason, self.settings])
        self.box.observe(lambda _: self._show_settings(), names="value")
        self.box.observe(lambda _: changed(), names="value")

    def _show_settings(self) -> None:
        """Filled when it is first switched on: each part is a message, and most techniques never are."""
        if self.box.value and not self.settings.children:
            cost = HTML(small(f"{self.cls.numerics} loss; costs {self.cls.costs}"))
            self.settings.children = [cost, *self.form.explained()]
        self.settings.layout.display = None if self.box.value else "none"

    def technique(self) -> Technique | None:
        """The technique if it is switched on. Raises ConfigurationError for a setting out of range."""
        if not self.box.value:
            return None
        self._last = self.cls(**self.form.values())
        return self._last

    def suit(self, recipe: Recipe, capability: tuple[int, int] | None) -> None:
        """While it is off: choose the settings that switching it on would add, those of before if the recipe takes
        them; grey it, with the reason, where no settings help."""
        reason = ""
        for one in self._choices(capability):
            try:
                if recipe | one:
                    self.form.fill(one.settings())
                    return self.allow("")
            except ConfigurationError as error:
                reason = reason or str(error).removeprefix("recipe: ")
        mendable = reason.startswith(f"{self.cls.name}:")  # by its own settings, which show when it is on
        return self.allow("" if mendable else reason)

    def _choices(self, capability: tuple[int, int] | None) -> list[Technique]:
        default, others = self.cls(), self.cls.variants(capability)
        usual = [default, *others] if default in others or not others else [*others]
        return usual if self._last in (None, default) else [self._last, *usual]

    def allow(self, reason: str) -> None:
        """Let it be switched on, or grey it and say why not."""
        self.box.disabled = bool(reason) and not self.box.value
        self.reason.value = f'<div style="margin-left: 1.5em">{small(reason)}</div>' if reason else ""

    def show(self, technique: Technique | None) -> None:
        if technique is not None:
            self.form.fill(technique.settings())
        self.box.value = technique is not None


class RecipeForm:
    """A whole recipe: its own settings, and a toggle for every technique there is, grouped by what they shrink.

    Args:
        recipe: what the controls are set to at first.
        changed: called without arguments after every change.
        techniques: the names of those that can be switched; by default all.
        between: widgets between the recipe's settings and the techniques.
    """

    MAIN = ("model", "corpus", "effective_batch_size", "sequence_length", "steps")

    def __init__(
        self,
        recipe: Recipe,
        changed: Callable[[], None],
        techniques: tuple[str, ...] | None = None,
        between: Sequence[w.Widget] = (),
    ) -> None:
        self._changed, self._filling = changed, False
        self.capability: tuple[int, int] | None = None
        self.form = Form(Recipe, self._react)
        known = REGISTRY if techniques is None else {name: REGISTRY[name] for name in techniques}
        self.toggles = {name: TechniqueToggle(cls, self._react) for name, cls in sorted(known.items())}
        main = [self.form.controls[name] for name in self.MAIN]
        self.error = HTML()
        self.view = VBox([*main, *self._more(), self.error, *between, *self._grouped()])
        self.show(recipe)

    def _more(self) -> list[w.Widget]:
        """The other settings, behind a button: an accordion cannot be opened with the keyboard."""
        names = (name for name in self.form.controls if name not in self.MAIN)
        rest = VBox(self.form.explained(*names), layout=w.Layout(display="none"))
        opened = w.ToggleButton(description="More settings", layout=w.Layout(width="20em"))
        opened.observe(lambda change: setattr(rest.layout, "display", None if change["new"] else "none"), names="value")
        return [opened, rest]

    def _grouped(self) -> list[w.Widget]:
        found: list[w.Widget] = []
        for title in (*GROUPS, ELSEWHERE):
            ones = [t.view for t in self.toggles.values() if _group(t.cls) == title]
            found += [HTML(f"<b>{title}</b>"), *ones] if ones else []
        return found

    def recipe(self) -> Recipe:
        """Raises ConfigurationError if the settings cannot be used, or the techniques not together."""
        chosen = (toggle.technique() for toggle in self.toggles.values())
        return replace(self.beside, **self.form.values(), techniques=tuple(t for t in chosen if t is not None))

    def valid(self) -> Recipe | None:
        """None while the recipe cannot be used; the form says why."""
        with suppress(ConfigurationError):
            return self.recipe()
        return None

    def show(self, recipe: Recipe) -> None:
        """Set every control to a recipe."""
        self._filling, self.beside = True, Recipe(arguments=recipe.arguments, callbacks=recipe.callbacks)
        self.form.fill({name: getattr(recipe, name) for name in self.form.controls})
        chosen = {technique.name: technique for technique in recipe.techniques}
        for name, toggle in self.toggles.items():
            toggle.show(chosen.get(name))
        self._filling = False
        self._react()

    def suit(self, capability: tuple[int, int] | None) -> None:
        """Offer what such a GPU can do from now on; None is a CPU."""
        self.capability = capability
        self._explain()

    def _react(self) -> None:
        if not self._filling:
            self._explain()
            self._changed()

    def _explain(self) -> None:
        """Grey what cannot be added to the recipe, and say what is wrong with the recipe as it is."""
        try:
            recipe = self.recipe()
        except ConfigurationError as error:
            self.error.value = alarm(error)
            return
        self.error.value, self._filling = "", True
        for toggle in self.toggles.values():
            toggle.allow("") if toggle.box.value else toggle.suit(recipe, self.capability)
        self._filling = False


def _group(cls: type[Technique]) -> str:
    first = cls.attacks[0] if cls.attacks else None
    return next((title for title, categories in GROUPS.items() if first in categories), ELSEWHERE)
