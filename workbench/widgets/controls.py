"""Input controls for the fields of dataclasses; the type and the choices of a setting decide which control it gets."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import Field, fields, replace
from typing import Any

import ipywidgets as w

from workbench.base.errors import ConfigurationError
from workbench.base.settings import describe_field, is_optional, parse_settings, type_name
from workbench.gpus.catalogue import GPUS
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.prediction.predict import CPU, why_not
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Technique
from workbench.texts.corpus import list_embedded
from workbench.widgets.gauge import nothing
from workbench.widgets.light import HTML, Checkbox, Combobox, Dropdown, HBox, Text, ToggleButton, VBox
from workbench.widgets.pages import alarm, small

# the values that the text field of a setting suggests
OFFERED = {"model": [EMBEDDED, *PUBLISHED, *(RANDOM + name for name in PUBLISHED)], "corpus": list_embedded()}
# these settings stand in the sentence at the top of the panel
SENTENCE = ("model", "effective_batch_size", "sequence_length")
# these settings stand with the training, in "Train it here"
OF_A_RUN = ("corpus", "steps")


class Form:
    """A control for each setting of one dataclass.

    Args:
        cls: the dataclass, whose fields made by `setting` get a control each.

    Attributes:
        on_change: is called after every change.
    """

    def __init__(self, cls: type[Any]) -> None:
        self.on_change: Callable[[], object] = nothing
        self.fields = {field.name: field for field in fields(cls) if "help" in field.metadata}
        self.controls = {name: control(field) for name, field in self.fields.items()}
        for widget in self.controls.values():
            widget.observe(self.react, names="value")

    def react(self, *_: object) -> None:
        self.on_change()

    def controls_with_help(self, names: Iterable[str]) -> list[w.Widget]:
        """Return the controls of these fields, each with its help below it."""
        widgets = []
        for name in names:
            widgets += [self.controls[name], HTML(small(help_of(self.fields[name])))]
        return widgets

    def values(self) -> dict[str, str]:
        """Return the settings by name, as text."""
        return {name: str(widget.value).strip() for name, widget in self.controls.items()}

    def fill(self, settings: object) -> None:
        """Set the controls to the values of an instance of the dataclass."""
        for name, widget in self.controls.items():
            value = getattr(settings, name)
            widget.value = text_of(value) if isinstance(widget, w.Text) else value


def control(field: Field[Any]) -> w.Widget:
    """Return the input for one setting.

    Typing counts when Enter is pressed or the field is left. Numbers are typed as text: an input for numbers would
    silently change a value that it refuses.
    """
    state: dict[str, Any] = {"description": field.name.replace("_", " "), "css": "wb-field"}
    if type_name(field) == "bool":
        return Checkbox(value=field.default, **state)
    choices = field.metadata["choices"]
    if choices:
        return Dropdown(options=choices, value=field.default, **state)
    state["value"] = text_of(field.default)
    if field.name in OFFERED:
        return Combobox(options=OFFERED[field.name], **state)
    return Text(placeholder="customary" if is_optional(field) else "", **state)


def text_of(value: object) -> str:
    return "" if value is None else str(value)


def help_of(field: Field[Any]) -> str:
    return f"{field.metadata['help']} ({describe_field(field)})"


class TechniqueToggle(Form):
    """A technique's checkbox, with the settings below it while it is on. It is greyed if the technique does not go
    together with what is chosen.

    Attributes:
        reason: why it is greyed; empty if it is not.
        facts: what the technique would save, cost and give up; `Switches` writes it.
    """

    def __init__(self, cls: type[Technique]) -> None:
        super().__init__(cls)
        self.cls = cls
        self.reason = ""
        self.box = Checkbox(description=cls.title, css="wb-switch")
        self.facts = HTML(css="wb-facts")
        self.settings = VBox(css="wb-indented wb-hidden")
        self.view = VBox([HBox([self.box, self.facts], css="wb-offer"), self.settings])
        self.box.observe(self._show_settings, names="value")
        # the technique with the settings it had when it was last on
        self._last: Technique | None = None

    def _show_settings(self, _: object) -> None:
        """Show the settings while the box is checked.

        They are made at the first check: each widget is a message, and most techniques are never switched on.
        """
        if self.box.value and not self.settings.children:
            cost = HTML(small(f"{self.cls.numerics} loss; costs {self.cls.costs}"))
            self.settings.children = [cost, *self.controls_with_help(self.fields)]
        show_if(self.box.value, self.settings)
        self.react()

    def technique(self) -> Technique:
        """Return the technique with the settings typed here, whether or not it is on.

        Raises ConfigurationError for a setting out of range.
        """
        return self.cls(**parse_settings(self.cls, self.values(), self.cls.name))

    def suit(self, recipe: Recipe, gpu: str) -> None:
        """Choose the settings that switching the technique on would add, or grey it if none help.

        A technique that is on keeps its settings.

        Args:
            recipe: the chosen recipe.
            gpu: a name of the catalogue, or "cpu".
        """
        self.reason = ""
        if self.box.value:
            self._last = self.technique()
        else:
            self.reason = self._choose_settings(recipe, gpu)
        # a reason that names the technique is mended by its own settings, which show when it is on
        if self.reason.startswith(f"{self.cls.name}:"):
            self.reason = ""
        self.box.disabled = bool(self.reason)

    def _choose_settings(self, recipe: Recipe, gpu: str) -> str:
        """Fill in the first settings that go with the recipe; if there are none, return the reason.

        The settings it had last are tried first, then the variants that the planner tries, the default before others.
        """
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
    """Controls for a whole recipe: its own settings, and a toggle for every technique.

    Args:
        recipe: the recipe that the controls are set to at first.
        techniques: the names of the techniques that can be switched.

    Attributes:
        error: shows what is wrong with the recipe, or else the remark.
        remark: a sentence about the recipe that stays, whatever is changed; empty: none.
    """

    def __init__(self, recipe: Recipe, techniques: Iterable[str] = REGISTRY) -> None:
        super().__init__(Recipe)
        self.gpu = CPU
        self.toggles = {name: TechniqueToggle(REGISTRY[name]) for name in sorted(techniques)}
        for toggle in self.toggles.values():
            toggle.on_change = self.react
        self.error = HTML()
        self.remark = ""
        self.show(recipe)

    def more(self) -> tuple[w.Widget, w.Widget]:
        """Return a button, and the box that it opens: the recipe's own settings that people seldom change.

        ipywidgets' accordion cannot be opened with the keyboard.
        """
        rest = VBox(css="wb-more wb-hidden")
        button = ToggleButton(description="more settings")

        def show_rest(_: object) -> None:
            if not rest.children:
                rest.children = self.controls_with_help(
                    name for name in self.fields if name not in (*SENTENCE, *OF_A_RUN)
                )
            show_if(button.value, rest)

        button.observe(show_rest, names="value")
        return button, rest

    def recipe(self) -> Recipe:
        """Return the chosen recipe.

        Raises ConfigurationError if a setting cannot be used, or the techniques do not go together.
        """
        settings = parse_settings(Recipe, self.values(), "recipe")
        techniques = [toggle.technique() for toggle in self.toggles.values() if toggle.box.value]
        return replace(self._without_controls, **settings, techniques=tuple(techniques))

    def valid(self) -> Recipe | None:
        """Return the chosen recipe, or None if it cannot be used; `error` says why."""
        with suppress(ConfigurationError):
            return self.recipe()
        return None

    def show(self, recipe: Recipe) -> None:
        """Set every control to a recipe."""
        self._is_filling = True
        # arguments and callbacks have no controls, and stay
        self._without_controls = Recipe(arguments=recipe.arguments, callbacks=recipe.callbacks)
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
        """Offer from now on what this GPU, or "cpu", can do."""
        if gpu != self.gpu:
            self.gpu = gpu
            self._explain()

    def react(self, *_: object) -> None:
        if not self._is_filling:
            self._explain()
            self.on_change()

    def _explain(self) -> None:
        """Grey the techniques that cannot be added, and say what is wrong with the recipe as it is."""
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
