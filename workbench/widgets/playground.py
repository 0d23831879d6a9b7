"""The playground: one panel to put a recipe together, see its memory, train it, compare it and take it home."""

from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import ipywidgets as w
from IPython.display import HTML, display
from markupsafe import escape

from workbench.base.errors import ConfigurationError
from workbench.base.launch import warm_up
from workbench.lessons.live import request
from workbench.lessons.timeline import scrubber
from workbench.prediction.predict import Prediction
from workbench.recipe import Recipe
from workbench.widgets import light
from workbench.widgets.cards import MakeItFit
from workbench.widgets.fits import WhatFits
from workbench.widgets.gauge import Gauge
from workbench.widgets.history import History
from workbench.widgets.pages import STYLE
from workbench.widgets.panel import Panel
from workbench.widgets.part import Background
from workbench.widgets.runner import RUNNER
from workbench.widgets.takehome import TakeHome
from workbench.widgets.train import Train

WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_KERNEL = "The panel needs a running kernel: run this cell again."
KEPT = "What stays of this panel when the page is exported, or its kernel is gone"


class Playground(Panel):
    """Shows itself as the result of a cell. Without a live page, as under papermill, it shows what it would say.

    Args:
        recipe: what the controls are set to at first; by default what people ask about, GPT-2 at 8 × 1,024.
        gpu: the GPU that the gauge predicts for at first.
        folder: where records go; by default `data/runs`.
    """

    _in_cell: ClassVar[dict[str, "Playground"]] = {}

    def __init__(self, recipe: Recipe | None = None, gpu: str = "t4", folder: Path | None = None) -> None:
        recipe = recipe or Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)
        super().__init__(recipe, gpu)
        self._kept: Any = None  # on a live page: what stays in the notebook when the widgets are gone
        self.train = Train(self.form.valid, self.form.show, folder, changed=self._ended)
        self.history = History(folder)
        self.timeline = TimelineTab(self.gauge)
        self.tabs: dict[str, Any] = {
            "Train": self.train,
            "Timeline": self.timeline,
            "What fits": WhatFits(),
            "Make it fit": MakeItFit(self.form.show),
            "History": self.history,
            "Take home": TakeHome(self.form.recipe, self.form.show),
        }
        self._lay_out()
        self.gauge.shown = self._answered
        self.train.suggest(recipe)
        self.answer()

    def _lay_out(self) -> None:
        self.tab = w.Tab([tab.view for tab in self.tabs.values()], _dom_classes=("workbench-tabs",))
        for number, title in enumerate(self.tabs):
            self.tab.set_title(number, title)
        self.tab.observe(self._show_tab, names="selected_index")
        self.train.start.on_click(self._open_train)
        controls = [*self.form.settings(), self.train.buttons, *self.form.switches()]
        form = light.VBox(controls, _dom_classes=("workbench-form",))
        body = w.Box([form, self.tab], _dom_classes=("workbench-body",))
        self.view = light.VBox([self.gauge.view, body], _dom_classes=("workbench-panel",))

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
        for part in (self.gauge, self.savings, self.train.here, self.train.advice, *self.tabs.values()):
            if isinstance(part, Background):
                part.stop()

    def as_page(self) -> str:
        """The chosen recipe, its predicted memory, the last run and the history."""
        recipe = self.form.valid()
        label = f"{recipe.model}, {recipe.label}" if recipe else "no recipe"
        status = f"<p><b>{escape(label)}</b></p>{self.gauge.page.value}<p>{escape(self.train.message)}</p>"
        return f"{STYLE}{status}{self.train.live.value}{self.history.table.value}"

    def _keep(self) -> None:
        if self._kept is not None:
            self._kept.update(HTML(f"<details><summary>{KEPT}</summary>{self.as_page()}</details>"))

    def answer(self, *_: object) -> None:
        """Something was chosen: the gauge answers at once, the open tab and the switches after it."""
        super().answer()
        self.train.show()
        self._show_tab()

    def _answered(self) -> None:
        self._keep()
        if self._kept is not None:
            warm_up()  # after the first prediction, which should not have to wait
        if self._open_tab is self.timeline:
            self.timeline.show()

    def _ended(self) -> None:
        self.history.refresh()
        self._keep()

    @property
    def _open_tab(self) -> Any:
        return list(self.tabs.values())[self.tab.selected_index or 0]

    def _open_train(self, _: object) -> None:
        self.tab.selected_index = 0

    def _show_tab(self, *_: object) -> None:
        """Only what is looked at is worked out."""
        with suppress(ConfigurationError):  # the gauge says so
            limit = self.gauge.limit
            self._open_tab.show(self.form.valid(), limit.gpu, limit.limit_bytes)


class TimelineTab:
    """The step that the gauge has predicted last, to drag through."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self.view = light.HTML()
        self._drawn: Prediction | None = None

    def show(self, *_: object) -> None:
        prediction = self.gauge.prediction
        if prediction is not None and prediction is not self._drawn:
            self._drawn = prediction
            self.view.value = scrubber([prediction], self.gauge.limit.budget_bytes)
