"""The playground: one panel to put a recipe together, see its memory, train it, compare it and take it home."""

import os
from pathlib import Path
from typing import Any

import ipywidgets as w
from IPython.display import HTML, display

from workbench.advise.candidate import Candidate
from workbench.advise.doctor import diagnose
from workbench.errors import ConfigurationError
from workbench.lessons import plots
from workbench.measure.categories import format_bytes
from workbench.recipe import Recipe
from workbench.records.record import Record, Status
from workbench.widgets.controls import RecipeForm
from workbench.widgets.gauge import Gauge
from workbench.widgets.history import History, table_of, texts
from workbench.widgets.pages import bar, escaped, legend, picture
from workbench.widgets.runner import Runner
from workbench.widgets.takehome import TakeHome

SAMPLE_TOKENS = 40
ALARM = "border-left: 6px solid #D55E00; padding-left: 0.8em"
QUIET = "border-left: 6px solid #009E73; padding-left: 0.8em"


class Playground:
    """Shows itself as the result of a cell. Without a live page, as under papermill, it shows what it would say.

    Args:
        recipe: what the controls are set to at first.
        gpu: the GPU that the gauge predicts for at first.
        folder: where records go; by default `data/runs`.
    """

    def __init__(self, recipe: Recipe | None = None, gpu: str = "h100", folder: Path | None = None) -> None:
        self.gauge = Gauge(gpu)
        self.runner = Runner(self._progressed, self._ended, folder)
        self.form = RecipeForm(recipe or Recipe(model="gpt2-tiny"), self._changed)
        self.start = w.Button(description="Start", button_style="primary", tooltip="train this recipe here")
        self.stop = w.Button(description="Stop", disabled=True, tooltip="end the training")
        self.cap = w.Text(
            description="memory cap", placeholder="none, or as 200MiB", style={"description_width": "7em"}
        )
        self.progress = w.IntProgress(min=0, max=1, layout=w.Layout(width="12em", flex="0 0 12em"))
        self.words = w.HTML("<p>Nothing is running.</p>")
        self.live = w.HTML(layout=w.Layout(min_height="22em"))
        self.advice = w.VBox()
        self.history, self.take_home = History(folder), TakeHome(self.form.recipe, self.form.show)
        self.view = self._laid_out()
        self._kept: Any = None  # what stays in the notebook when the widgets are gone
        self.start.on_click(lambda _: self.train())
        self.stop.on_click(lambda _: self._end())
        self._changed()

    def _laid_out(self) -> w.Widget:
        buttons = w.HBox([self.start, self.stop, self.cap], layout=w.Layout(flex_flow="row wrap"))
        train = w.VBox([buttons, w.HBox([self.progress, self.words]), self.advice, self.live])
        tabs = w.Tab([train, self.history.view, self.take_home.view], titles=("Train", "History", "Take home"))
        tabs.observe(self._opened, names="selected_index")
        right = w.VBox([self.gauge.view, tabs], layout=w.Layout(flex="1 1 32em", min_width="0"))
        left = w.VBox([self.form.view], layout=w.Layout(flex="0 0 23em", max_width="100%"))
        return w.Box([left, right], layout=w.Layout(display="flex", flex_flow="row wrap", gap="1.5em"))

    def _ipython_display_(self) -> None:
        if live_page():
            display(self.view)
            self._kept = display(HTML(""), display_id=True)
        else:
            display(HTML(self.as_page()))

    def as_page(self) -> str:
        """The chosen recipe and its predicted memory as HTML that needs no kernel."""
        self.gauge.wait()
        return f"<p><b>{escaped(self.form.recipe().label)}</b></p>{self.gauge.page.value}{self.history.table.value}"

    # ---- what the user does ----

    def train(self) -> None:
        """Start training what is chosen; does nothing while a training is running."""
        if self.runner.running:
            return
        try:
            recipe = self.form.recipe()
        except ConfigurationError as error:
            self._say(f"⚠ {error}", ALARM)
            return
        self.advice.children, self.live.value = (), ""
        self.progress.value, self.progress.max = 0, recipe.training_arguments()["max_steps"]
        self.progress.bar_style = ""
        self.start.disabled, self.stop.disabled = True, False
        self._say(f"{recipe.label}: loading …", QUIET)
        self.runner.start(recipe, self.cap.value.strip() or None, SAMPLE_TOKENS)

    def _end(self) -> None:
        self.stop.disabled = True
        self._say("Stopping …", QUIET)
        self.runner.stop()

    def _changed(self) -> None:
        if not hasattr(self, "form"):
            return  # the form calls while it is being made
        try:
            recipe = self.form.recipe()
        except ConfigurationError:
            recipe = None
        self.start.disabled = recipe is None or self.runner.running
        self.gauge.show(recipe)

    def _opened(self, change: dict[str, Any]) -> None:
        if change["new"] == 1:
            self.history.refresh()
        elif change["new"] == 2:
            self.take_home.refresh()

    # ---- what the training says, in its own thread ----

    def _progressed(self, record: Record) -> None:
        self.progress.value = record.steps_done
        self._say(f"{record.label}: step {record.steps_done} of {self.progress.max}{self._left(record)}", QUIET)
        self.live.value = _live(record)

    def _left(self, record: Record) -> str:
        seconds = self.runner.seconds_per_step * (self.progress.max - record.steps_done)
        return f", about {seconds:.0f} s left" if seconds else ""

    def _ended(self, record: Record | None, words: str) -> None:
        self.start.disabled, self.stop.disabled = False, True
        status = record.status if record is not None else Status.FAILED
        good = status in (Status.OK, Status.INTERRUPTED)
        self.progress.bar_style = "success" if status is Status.OK else "" if good else "danger"
        self._say(_summary(record, words), QUIET if good else ALARM)
        if record is not None:
            self.progress.value = record.steps_done
            self.live.value = _live(record) + (texts(record) if record.text_after else "")
        if self._kept is not None:
            kept = f"<p>{escaped(_summary(record, words))}</p>{self.live.value}"
            self._kept.update(HTML(kept + (table_of([record]) if record else "")))
        self.history.refresh()
        if record is not None and status is Status.OOM:
            self._advise(record)

    def _advise(self, record: Record) -> None:
        """After an out-of-memory, a button for each change that is predicted to fit, which sets the controls to it."""
        looking = w.HTML("<p>Looking for changes that would fit …</p>")
        self.advice.children = (looking,)
        diagnosis = diagnose(record)
        if looking not in self.advice.children:
            return  # the next training has begun
        cause = w.HTML(f"<p>{escaped(diagnosis.cause)}</p>")
        offers = diagnosis.changes or ((diagnosis.closest,) if diagnosis.closest else ())
        self.advice.children = (cause, *(self._offer(change) for change in offers))

    def _offer(self, change: Candidate) -> w.Widget:
        layout = w.Layout(width="auto")
        button = w.Button(description=change.words, tooltip=f"set the recipe to: {change.recipe.label}", layout=layout)
        button.on_click(lambda _: self.form.show(change.recipe))
        return button

    def _say(self, words: str, style: str) -> None:
        self.words.value = f'<div role="status" aria-live="polite" style="{style}">{escaped(words)}</div>'


def live_page() -> bool:
    """JupyterLab and Notebook say so to their kernels; papermill does not."""
    return "JPY_SESSION_NAME" in os.environ


def _live(record: Record) -> str:
    """The loss so far, and the categories at the peak so far."""
    parts = []
    if len(record.losses) > 1:
        words = f"Training loss from {record.losses[0]:.3f} to {record.losses[-1]:.3f} in {len(record.losses)} steps"
        parts.append(picture(plots.loss_curves([record]), words))
    if record.peak_allocated_bytes:
        words = f"Peak so far {format_bytes(record.peak_allocated_bytes)}, in the {record.peak_phase.replace('_', ' ')}"
        parts.append(f"<p>{escaped(words)} ({escaped(record.memory_source)}, measured)</p>")
        parts += [bar(record.by_category, record.memory_cap_bytes or 0, words), legend(record.by_category)]
    return "".join(parts)


def _summary(record: Record | None, words: str) -> str:
    if record is None:
        return f"⚠ not started: {words}"
    if record.status is Status.OK:
        loss = f"{record.held_out_loss_before:.3f} → {record.held_out_loss:.3f}"
        return f"✓ {record.label}: ok. Held-out loss {loss}, peak {format_bytes(record.peak_allocated_bytes or 0)}."
    sign = "■" if record.status is Status.INTERRUPTED else "⚠"
    return f"{sign} {record.label}: {record.status} after {record.steps_done} steps. {words or record.error}"
