"""The playground: a sentence to choose a fine-tuning, whether it fits, what would make it fit, and the script."""

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
from workbench.export.settings import read_settings
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
# seconds that a page without a live kernel waits for each of its predictions
PATIENCE_S = 240.0


class Playground:
    """The panel, which shows itself as the result of a cell. Without a live page, as under papermill, it shows a page.

    Args:
        recipe: the recipe that the controls are set to at first; by default GPT-2 124M with 8 × 1,024 tokens a step.
        gpu: the GPU to predict for at first.
        folder: where records go; by default `data/runs`.
    """

    _in_cell: ClassVar[dict[str, "Playground"]] = {}

    def __init__(self, recipe: Recipe | None = None, gpu: str = "t4", folder: Path | None = None) -> None:
        recipe = recipe or Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)
        # on a live page, the display of the page that stays in the notebook when the widgets are gone
        self._kept: Any = None
        # the states before this one, the newest last: recipe, remark, and the report on pasted settings
        self._history: list[tuple[Recipe, str, str]] = []
        self._recipe = recipe
        # the choices of the sentence for which the switches were arranged
        self._arranged_for: tuple[Any, ...] = ()
        self.gauge = Gauge(gpu)
        self.form = RecipeForm(recipe)
        self.savings = Savings(self.form.toggles)
        self.switches = Switches(self.form.toggles)
        self.fit = MakeItFit(self.form.show, self._take_home)
        self.train = Train(self.form.valid, folder, on_result=self._keep)
        self.parts: dict[str, Any] = {
            "See the step": Step(),
            "What fits where": WhatFits(),
            "Take the script home": TakeHome(self.form.recipe),
            "Train it here": self.train,
        }
        self._lay_out()
        self._connect()
        self.train.suggest(recipe)
        # a message is there at once if a training goes on, or if its kernel has ended
        if self.train.message:
            self.openers["Train it here"].value = True
        self.answer()

    # ---- layout ----

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
        style = light.HTML(STYLE + SCRIPT, css="wb-hidden")
        self.brought = light.HTML(small("Do you have settings already? Paste them anywhere in the playground."))
        parts = [style, self.chosen, light.HBox(sentence, css="wb-sentence"), rest, self.form.error, head]
        parts += [self.body, row_of_openers, self.brought]
        self.view = light.VBox(parts, css="workbench-panel")

    def _connect(self) -> None:
        for field in (self.gauge.gpu, self.gauge.budget):
            field.observe(self.answer, names="value")
        self.gauge.on_answer = self._on_verdict
        self.form.on_change = self.answer
        self.savings.on_offer = self._on_offer
        self.undo.on_click(self._step_back)
        self.chosen.observe(self._choose, names="value")
        for word in self.openers.values():
            word.observe(self._open, names="value")

    # ---- after a choice ----

    def answer(self, *_: object) -> None:
        """Ask for the verdict at once, and for the switches and the open part after it."""
        self.form.suit(self.gauge.gpu.value)
        recipe = self.form.valid()
        self._remember(recipe)
        self.fit.say("Predicting …" if recipe else "First mend what is said above.")
        self.gauge.show(recipe)
        self.switches.dim()
        with suppress(ConfigurationError):  # the gauge says that the limit cannot be read
            self.savings.show(recipe, self.gauge.limit)
        self.train.show()
        self._show_open_part()

    def _remember(self, recipe: Recipe | None) -> None:
        if recipe is None or recipe == self._recipe:
            return
        self._history.append((self._recipe, self.form.remark, self.brought.value))
        self._recipe = recipe
        self.undo.disabled = False

    def _step_back(self, _: object) -> None:
        if self._history:
            self._recipe, self.form.remark, self.brought.value = self._history.pop()
            self.form.show(self._recipe)
            self.undo.disabled = not self._history

    def _choose(self, _: object) -> None:
        """Take over a clicked card or cell of "What fits where", or pasted settings."""
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
        """Set the playground to a recipe, or to settings of Hugging Face's classes, and report what each became."""
        try:
            brought = read_settings(settings, self.form.valid())
            self.form.show(brought.recipe)
        except WorkbenchError as error:
            self.brought.value = alarm(f"Nothing was changed. {error}")
        else:
            self.brought.value = page("brought", brought=brought)
            self.form.remark_that(f"What is predicted is {brought.without}." if brought.without else "")

    # ---- after an answer, mostly in a thread ----

    def _on_verdict(self) -> None:
        self._keep()
        if self._kept is not None:
            warm_up()  # not before: the first prediction should not have to wait
        self._update_button()

    def _on_offer(self, name: str) -> None:
        offers = self.savings.offers
        self.switches.show_offer(name, offers[name])
        self._update_button()
        if len(offers) == len(self.form.toggles):
            self._arrange_switches()
            self._keep()

    def _arrange_switches(self) -> None:
        """Arrange the switches once for each choice of model, batch, length and card, so that they seldom move."""
        sentence = (*(self.form.controls[name].value for name in SENTENCE), self.gauge.gpu.value)
        if sentence != self._arranged_for:
            self._arranged_for = sentence
            self.switches.arrange(self.savings.offers)

    def _update_button(self) -> None:
        """Let the one button offer the script if the recipe fits, or else search what makes it fit."""
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
            self.fit.search(self._recipe, limit, self.savings.offers)

    # ---- the four parts that can be opened ----

    def _take_home(self) -> None:
        self.openers["Take the script home"].value = True

    def _open(self, change: Any) -> None:
        """Open a part, and close the one that was open."""
        if change["new"]:
            for word in self.openers.values():
                if word is not change["owner"]:
                    word.value = False
        for name, word in self.openers.items():
            word.description = f"✕ {name}" if word.value else name
        self._show_open_part(is_new=True)

    def _show_open_part(self, *, is_new: bool = False) -> None:
        """Compute and show the open part, and no other."""
        names = [name for name, word in self.openers.items() if word.value]
        show_if(bool(names), self.open_part)
        if not names:
            return
        part = self.parts[names[0]]
        if is_new:
            settings = self.form.controls_with_help(OF_A_RUN) if part is self.train else []
            self.open_part.children = [*settings, part.view]
        with suppress(ConfigurationError):  # the gauge says that the limit cannot be read
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
        # JupyterLab and VS Code send this name of the cell; other pages may not
        cell = request().get("metadata", {}).get("cellId")
        before = self._in_cell.get(cell, self)
        if cell and before is not self:
            before.close()
        self._in_cell[cell] = self
        display({WIDGET: self.view.get_view_spec(), "text/plain": WITHOUT_KERNEL}, raw=True)
        self._kept = display(HTML(""), display_id=True)
        self._keep()

    def close(self) -> None:
        """End all work of this panel: its cell has run again, and shows another."""
        RUNNER.detach(self.train)
        parts = (self.gauge, self.savings, self.fit, self.train.advice, self.train.preview)
        for part in (*parts, *self.parts.values()):
            if isinstance(part, Background):
                part.stop()

    def as_page(self) -> str:
        """Return HTML that needs no kernel: the recipe, its verdict, each technique's saving, and the newest runs."""
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
    """The part "See the step": the memory over one step, to drag through."""

    quiet_s = 0.7  # the gauge's own prediction comes first

    def answers(self, recipe: Recipe, gpu: str, limit_bytes: int) -> Iterator[str]:
        prediction = self.predict(recipe, gpu)
        # few of the predictions that come with the workbench have a timeline
        if prediction.timeline is None:
            prediction = predict_known(recipe, gpu, timeline=True)
        is_all = limit_bytes == room_bytes(gpu)
        frame = scrubber([prediction], None if is_all else limit_bytes - prediction.context_bytes)
        # the tab index lets the keyboard scroll the region
        yield f'<div tabindex="0" role="region" aria-label="the step">{frame}</div>'
