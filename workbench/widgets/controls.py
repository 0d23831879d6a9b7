"""Dataclass fields as ipywidgets: what a setting means, its range and its choices decide the control."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import Field, fields, replace
from itertools import chain
from typing import Any

import ipywidgets as w

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.base.settings import described, kind, optional, parse_settings
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Technique
from workbench.texts.corpus import embedded
from workbench.widgets.gauge import nothing
from workbench.widgets.light import HTML, Checkbox, Combobox, Dropdown, HBox, Text, VBox
from workbench.widgets.pages import alarm, small

TOOLTIP = "tooltip" if hasattr(w.Text, "tooltip") else "description_tooltip"  # ipywidgets 7, as on Colab
OFFERED = {"model": [EMBEDDED, *PUBLISHED, *(RANDOM + name for name in PUBLISHED)], "corpus": embedded()}
MAIN = ("model", "corpus", "effective_batch_size", "sequence_length", "steps")
STATES = "Gradients, optimizer states, weights"
GROUPS = {  # of the switches, by what they shrink first
    Category.WEIGHTS: STATES,
    Category.GRADIENTS: STATES,
    Category.OPTIMIZER_STATES: STATES,
    Category.ACTIVATIONS: "Activations",
    Category.LOGITS_AND_LOSS: "Logits and loss",
}
ELSEWHERE = "Data, kernels, allocator"


class Form:
    """Controls for the settings of one dataclass.

    Args:
        cls: its fields made by `setting` get a control each.

    Attributes:
        changed: called after every change.
    """

    def __init__(self, cls: type[Any]) -> None:
        self.changed: Callable[[], object] = nothing
        self.fields = {field.name: field for field in fields(cls) if "help" in field.metadata}
        self.controls = {name: control(field) for name, field in self.fields.items()}
        for widget in self.controls.values():
            widget.observe(self.react, names="value")

    def react(self, *_: object) -> None:
        self.changed()

    def explained(self, names: Iterable[str]) -> list[w.Widget]:
        """The controls of these fields, each with its help below it."""
        widgets = []
        for name in names:
            widgets += [self.controls[name], HTML(small(help_of(self.fields[name])))]
        return widgets

    def values(self) -> dict[str, str]:
        """As they are typed."""
        return {name: str(widget.value).strip() for name, widget in self.controls.items()}

    def fill(self, settings: object) -> None:
        """Set the controls to the values of such a dataclass."""
        for name, widget in self.controls.items():
            value = getattr(settings, name)
            widget.value = text_of(value) if isinstance(widget, w.Text) else value


def control(field: Field[Any]) -> w.Widget:
    """An input for one setting; its tooltip says what the setting is and what it accepts.

    What is typed counts when Enter is pressed or the field is left. Numbers are texts: an input for numbers would
    change what it does not like without a word.
    """
    state: dict[str, Any] = {"description": field.name.replace("_", " "), TOOLTIP: help_of(field)}
    state["_dom_classes"] = ("wb-field",)
    if kind(field) == "bool":
        return Checkbox(value=field.default, indent=False, **state)
    choices = field.metadata["choices"]
    if choices:
        return Dropdown(options=choices, value=field.default, **state)
    state["value"] = text_of(field.default)
    state["continuous_update"] = False
    if field.name in OFFERED:
        return Combobox(options=OFFERED[field.name], **state)
    return Text(placeholder="customary" if optional(field) else "", **state)


def text_of(value: object) -> str:
    return "" if value is None else str(value)


def help_of(field: Field[Any]) -> str:
    return f"{field.metadata['help']} ({described(field)})"


class TechniqueToggle(Form):
    """A checkbox with what the technique would save, what it costs, and its settings, which show while it is on;
    greyed with the reason where the technique does not go together with what is chosen."""

    def __init__(self, cls: type[Technique]) -> None:
        super().__init__(cls)
        self.cls = cls
        tooltip = f"{cls.title}. Costs: {cls.costs}. Same loss? {cls.numerics}."
        self.box = Checkbox(description=cls.title, indent=False, _dom_classes=("wb-switch",), **{TOOLTIP: tooltip})
        self.saving = HTML()
        self.reason = HTML(_dom_classes=("wb-indented",))
        self.settings = VBox(_dom_classes=("wb-indented", "wb-hidden"))
        self.view = VBox([HBox([self.box, self.saving]), self.reason, self.settings])
        self.box.observe(self._switched, names="value")
        self._last: Technique | None = None  # as it was when it was on

    def _switched(self, _: object) -> None:
        """Settings are filled in at first use: each part is a message, and most techniques are never switched on."""
        if self.box.value and not self.settings.children:
            cost = HTML(small(f"{self.cls.numerics} loss; costs {self.cls.costs}"))
            self.settings.children = [cost, *self.explained(self.fields)]
        show_if(self.box.value, self.settings)
        self.react()

    def technique(self) -> Technique:
        """With its present settings, whether or not it is on. Raises ConfigurationError for one out of range."""
        return self.cls(**parse_settings(self.cls, self.values(), self.cls.name))

    def suit(self, recipe: Recipe, capability: tuple[int, int] | None) -> None:
        """Where it is off: choose the settings that switching it on would add, those of before if the recipe takes
        them; grey it, with the reason, where no settings help."""
        reason = ""
        if self.box.value:
            self._last = self.technique()
        else:
            reason = self._fit(recipe, capability)
        if reason.startswith(f"{self.cls.name}:"):  # to be mended by its own settings, which show when it is on
            reason = ""
        self.box.disabled = bool(reason)
        self.reason.value = small(reason)

    def _fit(self, recipe: Recipe, capability: tuple[int, int] | None) -> str:
        """Take the first settings that go with the recipe; the reason if there are none."""
        default = self.cls()
        choices = list(self.cls.variants(capability))
        if default in choices or not choices:
            choices.insert(0, default)
        if self._last not in (None, default):
            choices.insert(0, self._last)
        reasons = []
        for technique in choices:
            try:
                _ = recipe | technique
            except ConfigurationError as error:
                reasons.append(str(error).removeprefix("recipe: "))
            else:
                self.fill(technique)
                return ""
        return reasons[0]

    def show(self, technique: Technique | None) -> None:
        if technique is not None:
            self.fill(technique)
        self.box.value = technique is not None


class RecipeForm(Form):
    """A whole recipe: its own settings, and a toggle for every technique.

    Args:
        recipe: what the controls are set to at first.
        techniques: the names of those that can be switched.

    Attributes:
        error: says what is wrong with the recipe.
    """

    def __init__(self, recipe: Recipe, techniques: Iterable[str] = REGISTRY) -> None:
        super().__init__(Recipe)
        self.capability: tuple[int, int] | None = None
        self.toggles = {name: TechniqueToggle(REGISTRY[name]) for name in sorted(techniques)}
        for toggle in self.toggles.values():
            toggle.changed = self.react
        self.error = HTML()
        self.show(recipe)

    def settings(self) -> list[w.Widget]:
        """Most of the recipe's own settings are behind a button: an accordion cannot be opened with the keyboard."""
        others = VBox(self.explained(name for name in self.fields if name not in MAIN))
        opened = w.ToggleButton(description="More settings", _dom_classes=("wb-more",))
        opened.observe(lambda _: show_if(opened.value, others), names="value")
        show_if(False, others)
        return [*(self.controls[name] for name in MAIN), opened, others, self.error]

    def switches(self) -> list[w.Widget]:
        """The toggles, grouped by what they shrink."""
        groups = {title: [HTML(f"<b>{title}</b>")] for title in (*GROUPS.values(), ELSEWHERE)}
        for toggle in self.toggles.values():
            first = toggle.cls.attacks[:1]
            title = GROUPS.get(first[0], ELSEWHERE) if first else ELSEWHERE
            groups[title].append(toggle.view)
        return list(chain.from_iterable(groups.values()))

    def recipe(self) -> Recipe:
        """Raises ConfigurationError if the settings cannot be used, or the techniques not together."""
        settings = parse_settings(Recipe, self.values(), "recipe")
        techniques = [toggle.technique() for toggle in self.toggles.values() if toggle.box.value]
        return replace(self._beside, **settings, techniques=tuple(techniques))

    def valid(self) -> Recipe | None:
        """None while the recipe cannot be used; `error` says why."""
        with suppress(ConfigurationError):
            return self.recipe()
        return None

    def show(self, recipe: Recipe) -> None:
        """Set every control to a recipe."""
        self._is_filling = True
        self._beside = Recipe(arguments=recipe.arguments, callbacks=recipe.callbacks)  # have no controls
        self.fill(recipe)
        techniques = {technique.name: technique for technique in recipe.techniques}
        for name, toggle in self.toggles.items():
            toggle.show(techniques.get(name))
        self._is_filling = False
        self.react()

    def suit(self, capability: tuple[int, int] | None) -> None:
        """Offer what such a GPU can do from now on; None is a CPU."""
        if capability != self.capability:
            self.capability = capability
            self._explain()

    def react(self, *_: object) -> None:
        if not self._is_filling:
            self._explain()
            self.changed()

    def _explain(self) -> None:
        """Grey what cannot be added to the recipe, and say what is wrong with the recipe as it is."""
        try:
            recipe = self.recipe()
        except ConfigurationError as error:
            self.error.value = alarm(error)
            return
        self.error.value = ""
        self._is_filling = True
        for toggle in self.toggles.values():
            toggle.suit(recipe, self.capability)
        self._is_filling = False


def show_if(is_shown: bool, widget: w.Widget) -> None:
    if is_shown:
        widget.remove_class("wb-hidden")
    else:
        widget.add_class("wb-hidden")
