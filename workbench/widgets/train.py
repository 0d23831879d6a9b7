"""The tab that trains: what Start would train on this machine, what it needs here, and how it goes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import ipywidgets as w
from markupsafe import escape

from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, of_device
from workbench.journal.record import Record, Status
from workbench.journal.store import mark_killed
from workbench.lessons.progress import duration
from workbench.measure.device import Device
from workbench.models.known import PUBLISHED
from workbench.models.source import EMBEDDED, RANDOM
from workbench.prediction.predict import CPU, predicted_peak
from workbench.recipe import Recipe
from workbench.training.job import why_not_here
from workbench.widgets.cards import Advice, Choose
from workbench.widgets.controls import show_if
from workbench.widgets.gauge import Gauge, Limit
from workbench.widgets.history import loss_picture
from workbench.widgets.light import HTML, Button, Checkbox, HBox, VBox
from workbench.widgets.pages import page, small
from workbench.widgets.runner import RUNNER, STOPPED
from workbench.widgets.sight import Sight, look_for_text

SAMPLE_TOKENS = 40
STAND_IN_TOKENS = 128
BAR_STYLES = {Status.OK: "success", Status.INTERRUPTED: ""}  # any other end is an alarm


class Train:
    """Start, Stop and what they show, alike in every panel of this kernel: there is one training at a time.

    Args:
        recipe: returns the chosen recipe; None while there is none.
        choose: sets the panel to another recipe.
        folder: where records go.
        changed: called when a run has ended.
    """

    def __init__(
        self,
        recipe: Callable[[], Recipe | None],
        choose: Choose,
        folder: Path | None,
        changed: Callable[[], None],
    ) -> None:
        self.recipe = recipe
        self.folder = folder
        self.changed = changed
        self.start = Button(description="Start", button_style="primary", tooltip="train here")
        self.stop = Button(description="Stop", disabled=True, tooltip="end the training")
        self.stands_in = Checkbox(
            description=f"with {EMBEDDED} in its place",
            indent=False,
            _dom_classes=("wb-switch",),
        )
        self.progress = w.IntProgress(max=1, _dom_classes=("wb-progress",))
        self.status = HTML("<p>Nothing is running.</p>")
        self.what = HTML()
        self.live = HTML()
        self.here = GaugeHere()
        self.sight = Sight(self._sighted)
        self.choose = choose
        self.advised: Recipe | None = None  # that the advice is about
        self.advice = Advice(self._take)
        self._advise(None)
        row = HBox([self.start, self.stop, self.stands_in], _dom_classes=("wb-row",))
        self.buttons = VBox([row, self.progress, self.status, self.what])
        self.view = VBox([self.here.budget, self.here.page, self.sight.view, self.advice.view, self.live])
        self.start.on_click(self.begin)
        self.stop.on_click(self.end)
        for field in (self.here.budget, self.stands_in):
            field.observe(self.show, names="value")
        self.message = ""
        for killed in mark_killed(folder)[-1:]:
            self._say(summary(killed, "Its kernel ended; the history has the steps until then."), "wb-alarm")
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

    def show(self, *_: object) -> None:
        """What would be trained, and what it needs here; or why it cannot be."""
        recipe = None
        reason = "The recipe cannot be used as it is."
        try:
            recipe = self.trained()
            if recipe and self.here.limit:  # raises for a cap that cannot be read
                look_for_text(recipe.corpus)
                reason = why_not_here(recipe, device_here())
        except WorkbenchError as error:
            reason = str(error)
        self.start.disabled = bool(reason) or RUNNER.running
        text = f"Start is off: {reason}"
        if recipe and not reason:
            text = start_in_words(recipe)
        self.what.value = small(text)
        self.here.show(recipe)
        self.sight.show()

    def _sighted(self) -> Recipe | None:
        """The recipe whose text is looked at; None while there is none."""
        with suppress(WorkbenchError):
            return self.trained()
        return None

    def begin(self, _: object) -> None:
        """Start training what is chosen."""
        try:
            recipe = self.trained()
            cap = self.here.budget.value.strip() or None
            if recipe:
                RUNNER.start(recipe, self.folder, memory_cap=cap, sample_tokens=SAMPLE_TOKENS)
        except WorkbenchError as error:
            self._say(f"⚠ {error}", "wb-alarm")

    def end(self, _: object) -> None:
        self.stop.disabled = True
        self._say("Stopping …")
        RUNNER.stop()

    # ---- what the training says, mostly in its own thread ----

    def began(self, recipe: Recipe) -> None:
        self._advise(None)
        self.live.value = ""
        self.progress.value = 0
        self.progress.max = recipe.training_arguments()["max_steps"]
        self.progress.bar_style = ""
        self.start.disabled = True
        self.stop.disabled = False
        self._say(f"{recipe.model}, {recipe.title}: loading …")

    def progressed(self, record: Record) -> None:
        seconds = RUNNER.seconds_per_step * (self.progress.max - record.steps_done)
        left = f", about {duration(seconds)} left" if seconds else ""
        self._say(f"{title_of(record)}: step {record.steps_done} of {self.progress.max}{left}")
        self._draw(record)

    def ended(self, record: Record | None, message: str) -> None:
        status = Status.INTERRUPTED if message == STOPPED else Status.FAILED
        if record:
            status = record.status
        self.progress.bar_style = BAR_STYLES.get(status, "danger")
        self.stop.disabled = True
        self._say(summary(record, message), "wb-quiet" if status in BAR_STYLES else "wb-alarm")
        self.show()
        if record:
            self._advise(record if status is Status.OOM else None)
            self._draw(record)
            self._draw(record, predicted_peak(record))
        self.changed()

    def _draw(self, record: Record, predicted: int | None = None) -> None:
        """The loss and the categories at the peak so far; at the end the prediction for this device, and the texts."""
        self.progress.value = record.steps_done
        curves = loss_picture([record])
        self.live.value = page("run", record=record, curves=curves, predicted=predicted)

    def _advise(self, record: Record | None) -> None:
        """What would have fitted, looked for in a thread of its own; None ends looking."""
        show_if(record is not None, self.advice.view)
        if record is None:
            self.advice.stop()
        else:
            self.advised = record.recipe
            self.advice.show(record)

    def _take(self, advised: Recipe) -> None:
        """Put what is advised on the recipe of the panel, which may be of another model than the one that was run."""
        recipe = self.recipe()
        if recipe is None or self.advised is None:
            self._say("⚠ Nothing was changed: first mend what the panel says of its recipe.", "wb-alarm")
            return
        changes = [technique for technique in advised.techniques if technique not in self.advised.techniques]
        names = {technique.name for technique in changes}
        kept = [technique for technique in recipe.techniques if technique.name not in names]
        try:
            changed = replace(recipe, techniques=(*kept, *changes))
        except WorkbenchError as error:
            self._say(f"⚠ Nothing was changed. {error}", "wb-alarm")
            return
        self.choose(changed)
        if recipe.model != self.advised.model:
            self._say(f"{changed.title}: found for {self.advised.model}, now set for {recipe.model} as well.")

    def _say(self, message: str, style: str = "wb-quiet") -> None:
        self.message = message
        self.status.value = f'<div role="status" aria-live="polite" class="{style}">{escape(message)}</div>'


class GaugeHere(Gauge):
    """What a recipe needs on this machine, against a cap. As in PyTorch, that is one for the allocator alone: CUDA's
    context comes beside it."""

    quiet_s = 0.3

    def __init__(self) -> None:
        super().__init__(here())
        self.quiet_s = GaugeHere.quiet_s
        self.budget.description = "memory cap"
        self.budget.placeholder = "none, or as 200MiB"

    @property
    def limit(self) -> Limit:
        limit = super().limit
        if limit.card and limit.budget_bytes:
            return replace(limit, budget_bytes=limit.budget_bytes + limit.card.context_bytes_estimate)
        return limit


@cache
def device_here() -> Device:
    return Device.find()


def here() -> str:
    """What predictions for this machine are made for: its GPU, or its CPU."""
    device = device_here()
    card = of_device(device.name, device.total_bytes) if device.kind == "cuda" else None
    return card.name if card else CPU


def start_in_words(recipe: Recipe) -> str:
    shape = recipe.shape
    where = "this machine's CPU" if here() == CPU else GPUS[here()].title
    how = f"Start trains {recipe.model}, {shape.sequences} × {shape.tokens} tokens a step, on {where}"
    return f"{how}: {recipe.title}."


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
