"""The playground: a sentence that says what is fine-tuned, whether it fits, what would make it fit, and the script."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from IPython.display import HTML, display
from markupsafe import Markup, escape

from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.launch import warm_up
from workbench.export.bring import read_settings
from workbench.gpus.catalogue import room_bytes
from workbench.lessons.cards import predict_known
from workbench.lessons.live import live_page, request
from workbench.lessons.timeline import scrubber
from workbench.recipe import Recipe
from workbench.widgets import light
from workbench.widgets.controls import OF_A_RUN, SENTENCE, RecipeForm, show_if
from workbench.widgets.fits import WhatFits
from workbench.widgets.gauge import Gauge
from workbench.widgets.make_it_fit import MakeItFit
from workbench.widgets.pages import SCRIPT, STYLE, alarm, page, small
from workbench.widgets.part import Background, Part
from workbench.widgets.runner import RUNNER
from workbench.widgets.savings import Savings
from workbench.widgets.switches import Switches
from workbench.widgets.takehome import TakeHome
from workbench.widgets.train import Train

WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_KERNEL = "The panel needs a running kernel: run this cell again."
KEPT = "What stays of this panel when the page is exported, or its kernel is gone"
PATIENCE_S = 240.0  # for a page that nobody looks at


class Playground:
    """Shows itself as the result of a cell. Without a live page, as under papermill, it shows what it would say.

    Args:
        recipe: what the controls are set to at first; by default what people ask about, GPT-2 at 8 × 1,024.
        gpu: the GPU to predict for at first.
        folder: where records go; by default `data/runs`.
    """

    _in_cell: ClassVar[dict[str, "Playground"]] = {}

    def __init__(self, recipe: Recipe | None = None, gpu: str = "t4", folder: Path | None = None) -> None:
        recipe = recipe or Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)
        # on a live page: what stays in the notebook when the widgets are gone
        self._kept: Any = None
        # before this one, the newest last: the recipe, what its prediction is without, and what was said of settings
        self._undone: list[tuple[Recipe, str, str]] = []
        self._recipe = recipe
        self._arranged_for: tuple[Any, ...] = ()  # the sentence for which the switches are in order
        self.gauge = Gauge(gpu)
        self.form = RecipeForm(recipe)
        self.savings = Savings(self.form.toggles)
        self.switches = Switches(self.form.toggles)
        self.fit = MakeItFit(self.form.show, self._take_home)
        self.train = Train(self.form.valid, folder, changed=self._keep)
        self.parts: dict[str, Any] = {
            "See the step": Step(),
            "What fits where": WhatFits(),
            "Take the script home": TakeHome(self.form.recipe),
            "Train it here": self.train,
        }
        self._lay_out()
        self._connect()
        self.train.suggest(recipe)
        if self.train.message:  # a training goes on, or its kernel has ended
            self.openers["Train it here"].value = True
        self.answer()

    # ---- what is where ----

    def _lay_out(self) -> None:
        more, rest = self.form.more()
        model, batch, length = map(self.form.controls.__getitem__, SENTENCE)
        sentence = [light.HTML("Fine-tune"), model, light.HTML("with"), batch, light.HTML("×"), length]
        sentence += [light.HTML("tokens a step on a"), self.gauge.gpu, light.HTML("within"), self.gauge.budget, more]
        self.undo = light.Button(description="Undo", disabled=True, css="wb-link")
        links = light.HBox([self.fit.another, self.undo], css="wb-links")
        act = light.VBox([self.fit.button, links], css="wb-act")
        head = light.Box([self.gauge.view, act], css="wb-head")
        self.openers = {name: light.ToggleButton(description=name, css="wb-word") for name in self.parts}
        row_of_openers = light.HBox(list(self.openers.values()), css="wb-words")
        self.open_part = light.VBox(css="wb-open wb-hidden")
        self.body = light.Box([self.switches.view, self.open_part], css="wb-body")
        self.chosen = light.Text(css="wb-chosen wb-hidden")
        looks = light.HTML(STYLE + SCRIPT, css="wb-hidden")
        self.brought = light.HTML(small("Paste settings that you have anywhere on this panel."))
        parts = [looks, self.chosen, light.HBox(sentence, css="wb-sentence"), rest, self.form.error, head]
        parts += [self.body, row_of_openers, self.brought]
        self.view = light.VBox(parts, css="workbench-panel")

    def _connect(self) -> None:
        for field in (self.gauge.gpu, self.gauge.budget):
            field.observe(self.answer, names="value")
        self.gauge.shown = self._predicted
        self.form.changed = self.answer
        self.savings.told = self._told
        self.savings.ended = self._all_told
        self.undo.on_click(self._undo)
        self.chosen.observe(self._choose, names="value")
        for word in self.openers.values():
            word.observe(self._open, names="value")

    # ---- what happens when something is chosen ----

    def answer(self, *_: object) -> None:
        """The verdict at once, the open part and the switches after it."""
        self.form.suit(self.gauge.gpu.value)
        recipe = self.form.valid()
        self._remember(recipe)
        self.fit.say("Predicting …" if recipe else "First mend what is said above.")
        self.gauge.show(recipe)
        self.switches.ask()
        with suppress(ConfigurationError):  # of a limit that cannot be read; the gauge says so
            self.savings.show(recipe, self.gauge.limit)
        self.train.show()
        self._show_open_part()

    def _remember(self, recipe: Recipe | None) -> None:
        if recipe is None or recipe == self._recipe:
            return
        self._undone.append((self._recipe, self.form.remark, self.brought.value))
        self._recipe = recipe
        self.undo.disabled = False

    def _undo(self, _: object) -> None:
        if self._undone:
            self._recipe, self.form.remark, self.brought.value = self._undone.pop()
            self.form.show(self._recipe)
            self.undo.disabled = not self._undone

    def _choose(self, _: object) -> None:
        """A card or a cell of "What fits where" was clicked, or settings were pasted."""
        if not self.chosen.value:
            return
        facts = json.loads(self.chosen.value)
        self.chosen.value = ""
        recipe = self.form.valid()
        if "settings" in facts:
            self.bring(facts["settings"])
        elif "gpu" in facts:
            self.gauge.gpu.value = facts["gpu"]
        elif recipe is not None:
            self.form.show(replace(recipe, **facts))

    def bring(self, settings: str) -> None:
        """Set the panel to a recipe, or to settings of another program, and say what each has become."""
        try:
            brought = read_settings(settings, self.form.valid())
            self.form.show(brought.recipe)
        except WorkbenchError as error:
            self.brought.value = alarm(f"{error} Nothing was changed.")
        else:
            self.brought.value = page("brought", brought=brought)
            self.form.remark_that(f"What is predicted is {brought.without}." if brought.without else "")

    # ---- what happens when something is known, mostly in a thread ----

    def _predicted(self) -> None:
        self._keep()
        if self._kept is not None:
            warm_up()  # after the first prediction, which should not have to wait
        self._decide()

    def _told(self, name: str) -> None:
        self.switches.tell(name, self.savings.offers[name])
        self._decide()

    def _all_told(self) -> None:
        """The switches stay where they are until another model, batch, length or card is chosen."""
        sentence = (*(self.form.controls[name].value for name in SENTENCE), self.gauge.gpu.value)
        if sentence != self._arranged_for:
            self._arranged_for = sentence
            self.switches.arrange(self.savings.offers)
        self._keep()

    def _decide(self) -> None:
        """What the one button does."""
        prediction = self.gauge.prediction
        if prediction is None:
            return
        limit = self.gauge.limit
        offer_count = len(self.savings.offers)
        if prediction.need_bytes <= limit.have_bytes:
            self.fit.offer_script()
        elif offer_count < len(self.form.toggles):
            self.fit.say(f"looking what is enough: {offer_count} of {len(self.form.toggles)} …")
        else:
            self.fit.look(self._recipe, limit, self.savings.offers)

    # ---- what stands behind the four buttons ----

    def _take_home(self) -> None:
        self.openers["Take the script home"].value = True

    def _open(self, change: Any) -> None:
        """One part is open at a time."""
        if change["new"]:
            for word in self.openers.values():
                if word is not change["owner"]:
                    word.value = False
        for name, word in self.openers.items():
            word.description = f"✕ {name}" if word.value else name
        self._show_open_part(is_new=True)

    def _show_open_part(self, *, is_new: bool = False) -> None:
        """Only what is looked at is worked out."""
        names = [name for name, word in self.openers.items() if word.value]
        show_if(bool(names), self.open_part)
        if not names:
            return
        part = self.parts[names[0]]
        if is_new:
            settings = self.form.explained(OF_A_RUN) if part is self.train else []
            self.open_part.children = [*settings, part.view]
        with suppress(ConfigurationError):  # the gauge says so
            limit = self.gauge.limit
            part.show(self.form.valid(), limit.gpu, limit.have_bytes)

    # ---- in the notebook ----

    def _ipython_display_(self) -> None:
        if live_page():
            self.show_live()
            return
        for part in (self.gauge, self.savings, self.fit):
            part.wait(PATIENCE_S)
        display(HTML(self.as_page()))

    def show_live(self) -> None:
        cell = request().get("metadata", {}).get("cellId")  # as JupyterLab and VS Code name it
        before = self._in_cell.get(cell, self)
        if cell and before is not self:
            before.close()
        self._in_cell[cell] = self
        display({WIDGET: self.view.get_view_spec(), "text/plain": WITHOUT_KERNEL}, raw=True)
        self._kept = display(HTML(""), display_id=True)
        self._keep()

    def close(self) -> None:
        """Do no more work: the cell has run again, and shows another panel."""
        RUNNER.detach(self.train)
        parts = (self.gauge, self.savings, self.fit, self.train.advice, self.train.preview)
        for part in (*parts, *self.parts.values()):
            if isinstance(part, Background):
                part.stop()

    def as_page(self) -> str:
        """The chosen recipe, its verdict, what each technique would do, and the newest runs; no kernel."""
        recipe = self.form.valid()
        label = "no recipe"
        if recipe:
            shape = recipe.shape
            label = f"{recipe.model}, {recipe.title}, {shape.sequences} × {shape.tokens} tokens a step"
        remedy = self.fit.button.description.replace("\n", ": ")
        rows = page("rows", toggles=self.form.toggles, offers=self.savings.offers)
        return (
            f"{STYLE}<div "
            f"class='wb-part'><p><b>{escape(label)}</b></p>{self.gauge.page.value}{small(remedy)}{rows}"
            f"<p>{escape(self.train.message)}</p>{self.train.live.value}{self.train.runs.value}</div>"
        )

    def _keep(self) -> None:
        if self._kept is not None:
            panel = Markup(self.as_page())
            self._kept.update(HTML(page("kept", title=KEPT, asleep=WITHOUT_KERNEL, page=panel)))


class Step(Part):
    """The step of the recipe, to drag through."""

    quiet_s = 0.7  # the gauge's own prediction comes first

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[str]:
        prediction = self.predict(recipe, gpu)
        if prediction.timeline is None:  # what comes with the workbench has none, but a few
            prediction = predict_known(recipe, gpu, timeline=True)
        is_all = limit_bytes == room_bytes(gpu)
        frame = scrubber([prediction], None if is_all else limit_bytes - prediction.context_bytes)
        # what scrolls is reached by keys
        yield f'<div tabindex="0" role="region" aria-label="the step">{frame}</div>'
