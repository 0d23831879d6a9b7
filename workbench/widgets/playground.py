"""The playground: one panel to put a recipe together, see its memory, train it, compare it and take it home."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import ipywidgets as w
from IPython.display import HTML, display
from markupsafe import escape

from workbench.errors import ConfigurationError
from workbench.launch import warm_up
from workbench.lessons.timeline import scrubber
from workbench.predict.predict import Prediction
from workbench.recipe import Recipe
from workbench.widgets.cards import MakeItFit
from workbench.widgets.controls import RecipeForm
from workbench.widgets.fits import WhatFits
from workbench.widgets.gauge import Gauge
from workbench.widgets.history import History
from workbench.widgets.light import VBox
from workbench.widgets.pages import cell, live_page
from workbench.widgets.part import Part
from workbench.widgets.pinned import Pinned
from workbench.widgets.runner import RUNNER
from workbench.widgets.savings import Savings
from workbench.widgets.several import SeveralCards
from workbench.widgets.takehome import TakeHome
from workbench.widgets.train import Train

STYLE = Path(__file__).with_suffix(".css")
WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_KERNEL = "The panel needs a running kernel: run this cell again."
KEPT = "What stays of this panel when the page is exported, or its kernel is gone"


class Playground:
    """Shows itself as the result of a cell. Without a live page, as under papermill, it shows what it would say.

    Args:
        recipe: what the controls are set to at first; by default what people ask about, GPT-2 at 8 × 1,024.
        gpu: the GPU that the gauge predicts for at first.
        folder: where records go; by default `data/runs`.
    """

    _in_cell: ClassVar[dict[str, "Playground"]] = {}

    def __init__(self, recipe: Recipe | None = None, gpu: str = "t4", folder: Path | None = None) -> None:
        recipe = recipe or Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)
        self._form: RecipeForm | None = None  # while it is made, its parts ask already
        self._drawn: Prediction | None = None  # on the timeline
        self._is_live = False  # on a page with a kernel
        self._kept: Any = None  # what stays in the notebook when the widgets are gone
        self.gauge = Gauge(gpu, changed=self._changed, shown=self._answered)
        self.train = Train(self.recipe, self.choose, folder, changed=self._ended)
        self.form = RecipeForm(recipe, self._changed, between=(self.train.buttons,))
        self.savings = Savings(self.form.toggles)
        self.history, self.take_home = History(folder), TakeHome(self.form.recipe, self.choose)
        self.timeline = w.HTML()
        parts = {"What fits": WhatFits, "Make it fit": MakeItFit, "Several cards": SeveralCards, "A and B": Pinned}
        self.parts: dict[str, Part] = {name: part(self.choose) for name, part in parts.items()}
        self._tabs: dict[str, tuple[w.Widget, Callable[..., None]]] = {
            "Train": (self.train.view, lambda *_: self.train.show()),
            "Timeline": (self.timeline, lambda *_: self._draw()),
            **{name: (part.view, part.show) for name, part in self.parts.items()},
            "History": (self.history.view, lambda *_: self.history.show()),
            "Take home": (self.take_home.view, lambda *_: self.take_home.refresh()),
        }
        self.view = self._laid_out()
        self._form = self.form
        self.train.suggest(recipe)
        self._changed()

    def _laid_out(self) -> w.Widget:
        self.tab = w.Tab([view for view, _ in self._tabs.values()])
        for number, title in enumerate(self._tabs):
            self.tab.set_title(number, title)
        self.tab.observe(lambda _: self._show_tab(), names="selected_index")
        self.train.start.on_click(lambda _: setattr(self.tab, "selected_index", 0))
        body = w.Box([self.form.view, self.tab])
        panel = VBox([w.HTML(f"<style>{STYLE.read_text(encoding='utf-8')}</style>"), self.gauge.view, body])
        for part, name in ((panel, "panel"), (body, "body"), (self.form.view, "form"), (self.tab, "tabs")):
            part.add_class(f"workbench-{name}")
        return panel

    def _ipython_display_(self) -> None:
        if not live_page():
            self.gauge.newest.wait()
            display(HTML(self.as_page()))
            return
        if cell() and (before := self._in_cell.get(cell(), self)) is not self:
            before.close()
        self._in_cell[cell()] = self
        self._is_live = True
        display({WIDGET: self.view.get_view_spec(), "text/plain": WITHOUT_KERNEL}, raw=True)
        self._kept = display(HTML(""), display_id=True)
        self._keep()

    def close(self) -> None:
        """Do no more work: the cell has run again, and shows another panel."""
        RUNNER.detach(self.train)
        others: list[Any] = [self.gauge, self.train.here, self.train.advice, self.savings, self.history]
        for part in (*others, *self.parts.values()):
            part.newest.stop()

    def as_page(self) -> str:
        """The chosen recipe, its predicted memory, the last run and the history, as HTML that needs no kernel."""
        recipe = self.recipe()
        label = f"{recipe.model}, {recipe.label}" if recipe else "no recipe"
        said = f"<p>{escape(self.train.said)}</p>"
        parts = self.gauge.page.value, said, self.train.live.value, self.history.table.value
        return f"<p><b>{escape(label)}</b></p>{''.join(parts)}"

    def _answered(self) -> None:
        self._keep()
        if self._is_live:
            warm_up()  # after the first prediction, which should not have to wait
        if self._form is not None and list(self._tabs)[self.tab.selected_index or 0] == "Timeline":
            self._draw()

    def _draw(self) -> None:
        """The step that the gauge has predicted, if it is another than the one that is shown."""
        found = self.gauge.prediction
        if found is None or found is self._drawn:
            return
        self._drawn = found
        self.timeline.value = scrubber([found], self.gauge.limit.budget_bytes)

    def _keep(self) -> None:
        if self._kept is not None:
            self._kept.update(HTML(f"<details><summary>{KEPT}</summary>{self.as_page()}</details>"))

    def recipe(self) -> Recipe | None:
        """What is chosen; None while it cannot be used."""
        return self._form.valid() if self._form else None

    def choose(self, recipe: Recipe) -> None:
        """Set all controls to a recipe."""
        self.form.show(recipe)

    def _changed(self) -> None:
        """Something was chosen: the gauge answers at once, the open tab and the switches after it."""
        if self._form is None:
            return
        self.form.suit(self.gauge.capability)
        self.gauge.show(recipe := self.recipe())
        self.train.show()
        with suppress(ConfigurationError):  # the gauge says so
            self.savings.show(recipe, self.gauge.limit)
        self._show_tab()

    def _show_tab(self) -> None:
        """Only what is looked at is worked out."""
        _, show = list(self._tabs.values())[self.tab.selected_index or 0]
        with suppress(ConfigurationError):
            limit = self.gauge.limit
            show(self.recipe(), limit.gpu, limit.limit_bytes)

    def _ended(self) -> None:
        self.history.refresh()
        self._keep()
