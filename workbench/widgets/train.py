"""The tab that trains: what Start would train on this machine, what it needs here, and how it goes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import ipywidgets as w
from markupsafe import escape

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, of_device
from workbench.lessons import plots
from workbench.measure.categories import format_bytes
from workbench.measure.device import Device
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.predict.beside import predicted_peak
from workbench.predict.predict import CPU
from workbench.recipe import Recipe
from workbench.records.record import Record, Status
from workbench.records.store import mark_killed
from workbench.run.job import why_not_here
from workbench.widgets.cards import Advice
from workbench.widgets.gauge import Gauge
from workbench.widgets.history import loss_words
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import page, picture, small
from workbench.widgets.part import Choose
from workbench.widgets.runner import RUNNER, STOPPED

Chosen = Callable[[], Recipe | None]

SAMPLE_TOKENS = 40
STAND_IN_TOKENS = 128
ALARM = "border-left: 6px solid #D55E00; padding-left: 0.8em"
QUIET = "border-left: 6px solid #009E73; padding-left: 0.8em"


class Train:
    """Start, Stop and what they show, alike in every panel of this kernel: there is one training at a time.

    Args:
        recipe: gives the chosen recipe; None while there is none.
        choose: sets the panel to another recipe.
        folder: where records go.
        changed: called when a run has begun or ended.
    """

    def __init__(self, recipe: Chosen, choose: Choose, folder: Path | None, changed: Callable[[], None]) -> None:
        self.recipe, self.choose, self.folder, self.changed = recipe, choose, folder, changed
        self.start = w.Button(description="Start", button_style="primary", tooltip="train here")
        self.stop = w.Button(description="Stop", disabled=True, tooltip="end the training")
        self.stands_in = w.Checkbox(description=f"with {EMBEDDED} in its place", indent=False)
        self.what, self.words, self.live = HTML(), HTML("<p>Nothing is running.</p>"), HTML()
        self.progress = w.IntProgress(min=0, max=1, layout=w.Layout(width="20em", height="1em"))
        self.here = Gauge(here(), changed=self.show, quiet_s=0.3)
        self.here.budget.description, self.here.budget.placeholder = "memory cap", "none, or as 200MiB"
        self.said, self.advice = "", Advice(choose)
        self.advice.view.layout = w.Layout(display="none")  # its own: it comes and goes
        start = w.HBox([self.start, self.stop, self.stands_in], layout=w.Layout(flex_flow="row wrap"))
        self.buttons = VBox([start, self.progress, self.words, self.what])
        self.view = VBox([self.here.budget, self.here.page, self.advice.view, self.live])
        self.start.on_click(lambda _: self.begin())
        self.stop.on_click(lambda _: self.end())
        self.stands_in.observe(lambda _: self.show(), names="value")
        for killed in mark_killed(folder)[-1:]:
            self._say(_summary(killed, "Its kernel ended; the history has the steps until then."), ALARM)
        RUNNER.attach(self)

    def suggest(self, recipe: Recipe) -> None:
        """At first, let a small model take the place of one that a CPU would train for hours."""
        self.stands_in.value = here() == CPU and recipe.model.removeprefix(RANDOM) in PUBLISHED

    def trained(self) -> Recipe | None:
        """What Start trains. Raises ConfigurationError where the stand-in does not go with the techniques."""
        recipe = self.recipe()
        if recipe is None or not self.stands_in.value:
            return recipe
        return replace(recipe, model=EMBEDDED, sequence_length=min(recipe.sequence_length, STAND_IN_TOKENS))

    def show(self) -> None:
        """What would be trained, and what it needs here; or why it cannot be."""
        reason, recipe = "", None
        try:
            recipe = self.trained()
            _ = self.here.limit
            reason = why_not_here(recipe, Device.find()) if recipe else "The recipe cannot be used as it is."
        except WorkbenchError as error:
            reason = str(error)
        self.start.disabled = bool(reason) or RUNNER.running
        self.what.value = small(f"Start is off: {reason}" if reason else _told(recipe))
        self.here.show(recipe)

    def begin(self) -> None:
        """Start training what is chosen."""
        try:
            if recipe := self.trained():
                cap = self.here.budget.value.strip() or None
                RUNNER.start(recipe, memory_cap=cap, sample_tokens=SAMPLE_TOKENS, folder=self.folder)
        except WorkbenchError as error:
            self._say(f"⚠ {error}", ALARM)

    def end(self) -> None:
        self.stop.disabled = True
        self._say("Stopping …", QUIET)
        RUNNER.stop()

    # ---- what the training says, mostly in its own thread ----

    def began(self, recipe: Recipe) -> None:
        self._advise(None)
        self.live.value = ""
        self.progress.value, self.progress.max = 0, recipe.training_arguments()["max_steps"]
        self.progress.bar_style = ""
        self.start.disabled, self.stop.disabled = True, False
        self._say(f"{recipe.label} on {recipe.model}: loading …", QUIET)

    def progressed(self, record: Record) -> None:
        self.progress.value = record.steps_done
        seconds = RUNNER.seconds_per_step * (self.progress.max - record.steps_done)
        left = f", about {seconds:.0f} s left" if seconds else ""
        self._say(f"{record.label}: step {record.steps_done} of {self.progress.max}{left}", QUIET)
        self.live.value = _live(record)

    def ended(self, record: Record | None, words: str) -> None:
        status = record.status if record is not None else Status.FAILED
        if record is None and words == STOPPED:
            status = Status.INTERRUPTED
        good = status in (Status.OK, Status.INTERRUPTED)
        self.progress.bar_style = "success" if status is Status.OK else "" if good else "danger"
        self.stop.disabled = True
        self._say(_summary(record, words), QUIET if good else ALARM)
        self.show()
        if record is not None:
            self.progress.value = record.steps_done
            self._advise(record if status is Status.OOM else None)
            self.live.value = _live(record)
            self.live.value = _live(record, predicted_peak(record))
        self.changed()

    def _advise(self, record: Record | None) -> None:
        """What would have fitted, looked for in a thread of its own; None ends looking."""
        self.advice.view.layout.display = "none" if record is None else None
        self.advice.show(record)

    def _say(self, words: str, style: str) -> None:
        self.said = words
        self.words.value = f'<div role="status" aria-live="polite" style="{style}">{escape(words)}</div>'


@cache
def here() -> str:
    """What predictions for this machine are made for: its GPU, or its CPU."""
    device = Device.find()
    card = of_device(device.name, device.total_bytes) if device.kind == "cuda" else None
    return card.name if card else CPU


def _told(recipe: Recipe | None) -> str:
    if recipe is None:
        return ""
    shape, where = recipe.shape, "this machine's CPU" if here() == CPU else GPUS[here()].title
    return f"Start trains {recipe.label} on {recipe.model}, {shape.sequences} × {shape.tokens} tokens, on {where}."


def _live(record: Record, predicted: int | None = None) -> str:
    """The loss and the categories at the peak so far; at the end the prediction for this device, and the texts."""
    curves = picture(plots.loss_curves([record]), loss_words([record])) if len(record.losses) > 1 else ""
    return page("run", record=record, curves=curves, predicted=predicted)


def _summary(record: Record | None, words: str) -> str:
    if record is None and words == STOPPED:
        return "■ Stopped before it began."
    if record is None:
        return f"⚠ not started: {words}"
    if record.status is Status.OK:
        loss = f"{record.held_out_loss_before:.3f} → {record.held_out_loss:.3f}"
        return f"✓ {record.label}: ok. Held-out loss {loss}, peak {format_bytes(record.peak_allocated_bytes or 0)}."
    sign = "■" if record.status is Status.INTERRUPTED else "⚠"
    more = "The tab Train says why, and what would fit." if record.status is Status.OOM else words or record.error
    return f"{sign} {record.label}: {record.status} after {record.steps_done} steps. {more}"
