"""The part that trains here: what Start would train, how it goes, what came of it, and the runs before it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import ipywidgets as w
from markupsafe import Markup, escape

from workbench.advise.doctor import cause, diagnose
from workbench.advise.frame import to_frame
from workbench.base.categories import format_bytes, parse_bytes
from workbench.base.device import Device
from workbench.base.errors import WorkbenchError
from workbench.journal.record import Record, Status, read_all
from workbench.journal.store import mark_killed
from workbench.lessons import plots
from workbench.lessons.progress import duration
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.prediction.predict import predicted_peak
from workbench.recipe import Recipe
from workbench.training.job import why_not_here
from workbench.widgets.light import HTML, Button, Checkbox, HBox, Text, VBox
from workbench.widgets.pages import page, small, status
from workbench.widgets.part import SEARCH, Part
from workbench.widgets.preview import Preview, look_for_text
from workbench.widgets.runner import RUNNER, STOPPED

SAMPLE_TOKENS = 40
STAND_IN_TOKENS = 128
RUNS = 20  # that are listed
COLUMNS = ["label", "model", "status", "steps_done", "peak_allocated_bytes", "held_out_loss"]
BAR_STYLES = {Status.OK: "success", Status.INTERRUPTED: ""}  # any other end is an alarm


class Train:
    """Start, Stop and what they show, alike in every panel of this kernel: there is one training at a time.

    Args:
        recipe: returns the chosen recipe; None while there is none.
        folder: where records go.
        changed: called when a run has ended.
    """

    def __init__(self, recipe: Callable[[], Recipe | None], folder: Path | None, changed: Callable[[], None]) -> None:
        self.recipe = recipe
        self.folder = folder
        self.changed = changed
        self.message = ""
        self.start = Button(description="Start", button_style="primary")
        self.stop = Button(description="Stop", disabled=True)
        self.stands_in = Checkbox(description=f"with {EMBEDDED} in its place", css="wb-switch")
        self.cap = Text(description="memory cap", placeholder="none, or as 200MiB", css="wb-field")
        self.progress = w.IntProgress(max=1, _dom_classes=("wb-progress",))
        self.status = HTML("<p>Nothing is running.</p>")
        self.what = HTML()
        self.live = HTML()
        self.runs = HTML()
        self.preview = Preview(self.trained)
        self.advice = Advice()
        row = HBox([self.start, self.stop, self.stands_in, self.cap], css="wb-row")
        parts = [self.progress, self.status, self.what, self.preview.view, self.advice.view, self.live, self.runs]
        self.view = VBox([row, *parts])
        self.start.on_click(self.begin)
        self.stop.on_click(self.end)
        for field in (self.cap, self.stands_in):
            field.observe(self.show, names="value")
        for killed in mark_killed(folder)[-1:]:
            self._say(summary(killed, "Its kernel ended; its record has the steps until then."), "wb-alarm")
        self._list_runs()
        RUNNER.attach(self)

    def suggest(self, recipe: Recipe) -> None:
        """At first, let a small model take the place of one that a CPU would train for hours."""
        self.stands_in.value = device_here().kind == "cpu" and recipe.model.removeprefix(RANDOM) in PUBLISHED

    def trained(self) -> Recipe | None:
        """What Start trains. Raises ConfigurationError where the stand-in does not go with the techniques."""
        recipe = self.recipe()
        if recipe is None or not self.stands_in.value:
            return recipe
        return replace(recipe, model=EMBEDDED, sequence_length=min(recipe.sequence_length, STAND_IN_TOKENS))

    def show(self, *_: object) -> None:
        """What would be trained, or why it cannot be."""
        recipe = None
        reason = "The recipe cannot be used as it is."
        try:
            recipe = self.trained()
            if self.cap.value:
                parse_bytes(self.cap.value, "memory cap")
            if recipe:
                look_for_text(recipe.corpus)
                reason = why_not_here(recipe, device_here())
        except WorkbenchError as error:
            reason = str(error)
        self.start.disabled = bool(reason) or RUNNER.running
        self.what.value = small(start_in_words(recipe) if recipe and not reason else f"Start is off: {reason}")
        if recipe != self.preview.shown_for:
            self.preview.forget()

    def begin(self, _: object) -> None:
        """Start training what is chosen."""
        try:
            recipe = self.trained()
            if recipe:
                RUNNER.start(recipe, self.folder, memory_cap=self.cap.value or None, sample_tokens=SAMPLE_TOKENS)
        except WorkbenchError as error:
            self._say(f"⚠ {error}", "wb-alarm")

    def end(self, _: object) -> None:
        self.stop.disabled = True
        self._say("Stopping …")
        RUNNER.stop()

    # ---- what the training says, mostly in its own thread ----

    def began(self, recipe: Recipe) -> None:
        self.advice.forget()
        self.live.value = ""
        self.progress.value = 0
        self.progress.max = recipe.training_arguments()["max_steps"]
        self.progress.bar_style = ""
        self.start.disabled = True
        self.stop.disabled = False
        self._first: tuple[int, float] | None = None  # the step that was seen first, and when
        self._say(f"{recipe.model}, {recipe.title}: loading …")

    def progressed(self, record: Record) -> None:
        now_s = time.monotonic()
        first_step, first_at_s = self._first = self._first or (record.steps_done, now_s)
        left = ""
        if record.steps_done > first_step:
            seconds_per_step = (now_s - first_at_s) / (record.steps_done - first_step)
            left = f", about {duration(seconds_per_step * (self.progress.max - record.steps_done))} left"
        self._say(f"{title_of(record)}: step {record.steps_done} of {self.progress.max}{left}")
        self._draw(record)

    def ended(self, record: Record | None, message: str) -> None:
        how = Status.INTERRUPTED if message == STOPPED else Status.FAILED
        if record:
            how = record.status
        self.progress.bar_style = BAR_STYLES.get(how, "danger")
        self.stop.disabled = True
        self._say(summary(record, message), "wb-quiet" if how in BAR_STYLES else "wb-alarm")
        self.show()
        if record:
            if how is Status.OOM:
                self.advice.show(record)
            self._draw(record)
        self._list_runs()
        self.changed()
        if record:
            device = Device(record.device_kind, record.device_name, record.device_bytes)
            self._draw(record, predicted_peak(record.recipe_settings, device))  # seconds later
            self.changed()

    def _draw(self, record: Record, predicted: int | None = None) -> None:
        """The loss and the categories at the peak so far; at the end the prediction for this device, and the texts."""
        self.progress.value = record.steps_done
        curves = ""
        if len(record.losses) > 1:
            figure = plots.loss_curves([record])
            figure.description = f"Training loss: {record.label} from {record.losses[0]:.3f} to {record.losses[-1]:.3f}"
            curves = Markup(figure._repr_html_())
        self.live.value = page("run", record=record, curves=curves, predicted=predicted)

    def _list_runs(self) -> None:
        """The newest runs on record, of this and of earlier kernels."""
        frame = to_frame(read_all(self.folder, newest=RUNS)[::-1])[COLUMNS]
        # pandas' own NA would be printed
        frame = frame.astype(object).where(frame.notna(), math.nan)
        formatters = {"peak_allocated_bytes": format_bytes, "held_out_loss": "{:.3f}".format}
        table = frame.to_html(index=False, border=0, na_rep="", formatters=formatters)
        self.runs.value = page("runs", table=table)

    def _say(self, message: str, style: str = "wb-quiet") -> None:
        self.message = message
        self.status.value = f'<div role="status" aria-live="polite" class="{style}">{escape(message)}</div>'


class Advice(Part):
    """After a run that ran out of memory: the cause at once, then what the doctor says would have fitted."""

    def answers(self, record: Record) -> Iterator[str]:
        with SEARCH:
            yield status(f"{cause(record)} Looking for changes that fit …")
            yield diagnose(record, predict=cache(self.predict))._repr_html_()


@cache
def device_here() -> Device:
    return Device.find()


def start_in_words(recipe: Recipe) -> str:
    device = device_here()
    where = "this machine's CPU" if device.kind == "cpu" else device.name
    shape = recipe.shape
    step = f"{shape.sequences} × {shape.tokens} tokens a step"
    return f"Start trains {recipe.model} with the text {recipe.corpus}, {step}, on {where}: {recipe.title}."


def title_of(record: Record) -> str:
    """Its techniques by their titles; of a record of another version, whose recipe cannot be read, its label."""
    with suppress(WorkbenchError):
        return record.recipe.title
    return record.label


def summary(record: Record | None, message: str) -> str:
    """How a run ended; `message` is why, if that is not in the record."""
    if record is None:
        return "■ Stopped before it began." if message == STOPPED else f"⚠ not started: {message}"
    if record.status is Status.OK:
        loss = f"{record.held_out_loss_before:.3f} → {record.held_out_loss:.3f}"
        peak = format_bytes(record.peak_allocated_bytes or 0)
        return f"✓ {title_of(record)}: ok. Held-out loss {loss}, peak {peak}."
    sign = "■" if record.status is Status.INTERRUPTED else "⚠"
    reason = message or record.error
    if record.status is Status.OOM:
        reason = '"Train it here" says why, and what would fit.'
    return f"{sign} {title_of(record)}: {record.status} after {record.steps_done} steps. {reason}"
