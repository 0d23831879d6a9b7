"""Dataclass fields as ipywidgets: what a setting means, its range and its choices decide the control."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import Field, fields, replace
from typing import Any

import ipywidgets as w

from workbench.base.errors import ConfigurationError
from workbench.base.settings import described, kind, optional, parse_settings
from workbench.gpus.catalogue import GPUS
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.prediction.predict import CPU, why_not
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Technique
from workbench.texts.corpus import embedded
from workbench.widgets.gauge import nothing
from workbench.widgets.light import HTML, Checkbox, Combobox, Dropdown, HBox, Text, ToggleButton, VBox
from workbench.widgets.pages import alarm, small

OFFERED = {"model": [EMBEDDED, *PUBLISHED, *(RANDOM + name for name in PUBLISHED)], "corpus": embedded()}
SENTENCE = ("model", "effective_batch_size", "sequence_length")
OF_A_RUN = ("corpus", "steps")  # stand where it is trained


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
    """An input for one setting.

    What is typed counts when Enter is pressed or the field is left. Numbers are texts: an input for numbers would
    change what it does not like without a word.
    """
    state: dict[str, Any] = {"description": field.name.replace("_", " "), "css": "wb-field"}
    if kind(field) == "bool":
        return Checkbox(value=field.default, **state)
    choices = field.metadata["choices"]
    if choices:
        return Dropdown(options=choices, value=field.default, **state)
    state["value"] = text_of(field.default)
    if field.name in OFFERED:
        return Combobox(options=OFFERED[field.name], **state)
    return Text(placeholder="customary" if optional(field) else "", **state)


def text_of(value: object) -> str:
    return "" if value is None else str(value)


def help_of(field: Field[Any]) -> str:
    return f"{field.metadata['help']} ({described(field)})"


class TechniqueToggle(Form):
    """A checkbox, with its settings below it while it is on; greyed where the technique does not go together with what
    is chosen.

    Attributes:
        reason: why it is greyed; empty where it is not.
        facts: what it would save, cost and give up, as others find out.
    """

    def __init__(self, cls: type[Technique]) -> None:
        super().__init__(cls)
        self.cls = cls
        self.reason = ""
        self.box = Checkbox(description=cls.title, css="wb-switch")
        self.facts = HTML(css="wb-facts")
        self.settings = VBox(css="wb-indented wb-hidden")
        self.view = VBox([HBox([self.box, self.facts], css="wb-offer"), self.settings])
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

    def suit(self, recipe: Recipe, gpu: str) -> None:
        """Where it is off: choose the settings that switching it on would add, those of before if the recipe takes
        them; grey it, with the reason, where no settings help on such a device."""
        self.reason = ""
        if self.box.value:
            self._last = self.technique()
        else:
            self.reason = self._fit(recipe, gpu)
        # to be mended by its own settings, which show when it is on
        if self.reason.startswith(f"{self.cls.name}:"):
            self.reason = ""
        self.box.disabled = bool(self.reason)

    def _fit(self, recipe: Recipe, gpu: str) -> str:
        """Take the first settings that go with the recipe; the reason if there are none."""
        default = self.cls()
        choices = list(self.cls.variants(GPUS[gpu].compute_capability if gpu in GPUS else None))
        if default in choices or not choices:
            choices.insert(0, default)
        if self._last not in (None, default):
            choices.insert(0, self._last)
        reasons = []
        for technique in choices:
            try:
                reason = why_not(recipe | technique, gpu)
            except ConfigurationError as error:
                reason = str(error).removeprefix("recipe: ")
            if not reason:
                self.fill(technique)
                return ""
            reasons.append(reason)
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
        error: says what is wrong with the recipe; where nothing is, the remark.
        remark: what is to be known of the recipe, whatever is changed of it.
    """

    def __init__(self, recipe: Recipe, techniques: Iterable[str] = REGISTRY) -> None:
        super().__init__(Recipe)
        self.gpu = CPU
        self.toggles = {name: TechniqueToggle(REGISTRY[name]) for name in sorted(techniques)}
        for toggle in self.toggles.values():
            toggle.changed = self.react
        self.error = HTML()
        self.remark = ""
        self.show(recipe)

    def more(self) -> tuple[w.Widget, w.Widget]:
        """A button, and below it the recipe's own settings that people seldom change: an accordion cannot be opened
        with the keyboard."""
        rest = VBox(css="wb-more wb-hidden")
        button = ToggleButton(description="more settings")

        def opened(_: object) -> None:
            if not rest.children:
                rest.children = self.explained(name for name in self.fields if name not in (*SENTENCE, *OF_A_RUN))
            show_if(button.value, rest)

        button.observe(opened, names="value")
        return button, rest

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
        # have no controls
        self._beside = Recipe(arguments=recipe.arguments, callbacks=recipe.callbacks)
        self.fill(recipe)
        techniques = {technique.name: technique for technique in recipe.techniques}
        for name, toggle in self.toggles.items():
            toggle.show(techniques.get(name))
        self._is_filling = False
        self.react()

    def remark_that(self, remark: str) -> None:
        self.remark = remark
        self.error.value = alarm(remark) if remark else ""

    def suit(self, gpu: str) -> None:
        """Offer what this GPU, or "cpu", can do from now on."""
        if gpu != self.gpu:
            self.gpu = gpu
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
        self.remark_that(self.remark)
        self._is_filling = True
        for toggle in self.toggles.values():
            toggle.suit(recipe, self.gpu)
        self._is_filling = False


def show_if(is_shown: bool, widget: w.Widget) -> None:
    if is_shown:
        widget.remove_class("wb-hidden")
    else:
        widget.add_class("wb-hidden")
