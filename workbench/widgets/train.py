"""The part "Train it here": the training that Start would begin, its progress and result, and the runs before it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import ipywidgets as w
from markupsafe import Markup, escape

from workbench.advise.doctor import Diagnosis, diagnose
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
from workbench.prediction.predict import predict_peak
from workbench.recipe import Recipe
from workbench.training.job import why_not_on_device
from workbench.widgets.light import HTML, Button, Checkbox, HBox, Text, VBox
from workbench.widgets.pages import page, small, status
from workbench.widgets.part import SEARCH, Part
from workbench.widgets.preview import Preview, look_for_text
from workbench.widgets.runner import RUNNER, STOPPED

# tokens of the text that is generated before and after a training
SAMPLE_TOKENS = 40
# the longest sequence of the small model that stands in for a large one
STAND_IN_TOKENS = 128
# the newest runs that the table lists
RUNS = 20
COLUMNS = ["label", "model", "status", "steps_done", "peak_allocated_bytes", "held_out_loss"]
# the progress bar is red after any other end
BAR_STYLES = {Status.OK: "success", Status.INTERRUPTED: ""}


class Train:
    """The buttons Start and Stop, and what they show, alike in every panel of this kernel: it has one training at a
    time.

    Args:
        recipe: returns the chosen recipe; None while there is none.
        folder: where records go; None: `data/runs`.
        on_result: is called when a run has ended, and again when its prediction is there.
    """

    def __init__(self, recipe: Callable[[], Recipe | None], folder: Path | None, on_result: Callable[[], None]) -> None:
        self.recipe = recipe
        self.folder = folder
        self.on_result = on_result
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
        self.preview = Preview(self.recipe_to_train)
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
        """Choose at first whether a small model takes the place of one that a CPU would train for hours."""
        self.stands_in.value = device_here().kind == "cpu" and recipe.model.removeprefix(RANDOM) in PUBLISHED

    def recipe_to_train(self) -> Recipe | None:
        """Return the recipe that Start trains, or None if there is none.

        Raises ConfigurationError if the small model does not go with the techniques.
        """
        recipe = self.recipe()
        if recipe is None or not self.stands_in.value:
            return recipe
        return replace(recipe, model=EMBEDDED, sequence_length=min(recipe.sequence_length, STAND_IN_TOKENS))

    def show(self, *_: object) -> None:
        """Say what Start would train, or why it cannot."""
        recipe = None
        reason = "The recipe cannot be used as it is."
        try:
            recipe = self.recipe_to_train()
            if self.cap.value:
                parse_bytes(self.cap.value, "memory cap")
            if recipe:
                look_for_text(recipe.corpus)
                reason = why_not_on_device(recipe, device_here())
        except WorkbenchError as error:
            reason = str(error)
        self.start.disabled = bool(reason) or RUNNER.running
        self.what.value = small(start_in_words(recipe) if recipe and not reason else f"Start is off: {reason}")
        if recipe != self.preview.shown_for:
            self.preview.forget()

    def begin(self, _: object) -> None:
        """Start the training, after a press of Start."""
        try:
            recipe = self.recipe_to_train()
            if recipe:
                RUNNER.start(recipe, self.folder, memory_cap=self.cap.value or None, sample_tokens=SAMPLE_TOKENS)
        except WorkbenchError as error:
            self._say(f"⚠ {error}", "wb-alarm")

    def end(self, _: object) -> None:
        """Stop the training, after a press of Stop."""
        self.stop.disabled = True
        self._say("Stopping …")
        RUNNER.stop()

    # ---- events of the training, mostly in its own thread ----

    def on_begin(self, recipe: Recipe) -> None:
        self.advice.forget()
        self.live.value = ""
        self.progress.value = 0
        self.progress.max = recipe.training_arguments()["max_steps"]
        self.progress.bar_style = ""
        self.start.disabled = True
        self.stop.disabled = False
        # the first step that was reported, and its time
        self._first: tuple[int, float] | None = None
        self._say(f"{recipe.model}, {recipe.title}: loading …")

    def on_progress(self, record: Record) -> None:
        now_s = time.monotonic()
        first_step, first_at_s = self._first = self._first or (record.steps_done, now_s)
        left = ""
        if record.steps_done > first_step:
            seconds_per_step = (now_s - first_at_s) / (record.steps_done - first_step)
            left = f", about {duration(seconds_per_step * (self.progress.max - record.steps_done))} left"
        self._say(f"{title_of(record)}: step {record.steps_done} of {self.progress.max}{left}")
        self._draw(record)

    def on_end(self, record: Record | None, message: str) -> None:
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
        self.on_result()
        if record:
            device = Device(record.device_kind, record.device_name, record.device_bytes)
            self._draw(record, predict_peak(record.recipe_settings, device))  # seconds later
            self.on_result()

    def _draw(self, record: Record, predicted: int | None = None) -> None:
        """Draw the losses, and the categories at the peak so far; at the end the predicted peak, and the texts."""
        self.progress.value = record.steps_done
        curves = ""
        if len(record.losses) > 1:
            figure = plots.loss_curves([record])
            figure.description = f"Training loss: {record.label} from {record.losses[0]:.3f} to {record.losses[-1]:.3f}"
            curves = Markup(figure._repr_html_())
        self.live.value = page("run", record=record, curves=curves, predicted=predicted)

    def _list_runs(self) -> None:
        """List the newest runs on record, of this and of earlier kernels."""
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
    """The advice after a run that ran out of memory: the cause at once, then changes that would have fitted."""

    def answers(self, record: Record) -> Iterator[str]:
        with SEARCH:
            yield status(f"{Diagnosis(record).cause} Looking for changes that fit …")
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
    """Return a record's techniques by their titles, or its label if its recipe, of another version, cannot be read."""
    with suppress(WorkbenchError):
        return record.recipe.title
    return record.label


def summary(record: Record | None, message: str) -> str:
    """Say how a run ended; `message` is the reason, if that is not in the record."""
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
