"""Who looks on at every step of a run."""

import math
import time
from typing import Any

import torch
from transformers import TrainerCallback

from workbench.base.bar import progress_bar
from workbench.measure.meter import Meter
from workbench.training.place import Place
from workbench.training.stopwatch import WARM_UP_STEPS, Stopwatch

WRITE_EVERY_S = 0.5  # what a killed run has measured until then; a panel shows it
WRITE_SHARE = 0.02  # of the time, at most: a record of 100,000 steps takes a sixth of a second
WRITE_WITHIN_S = 5.0  # a disk that was busy once must not leave the page still for a minute


class Watch(TrainerCallback):
    """Attributes the warm-up steps, times the others, stops at a loss that is not finite, writes the record at times.

    A cap that the meter enforces keeps the tracker on in every step; then none is timed.
    """

    def __init__(self, here: Place, meter: Meter) -> None:
        self.here = here
        self.meter = meter
        self.losses_are_finite = True
        self.skipped_steps = 0
        self.write_at_s = time.monotonic() + WRITE_EVERY_S
        self.stopwatch = Stopwatch()
        job = here.job
        self.bar = progress_bar(total=job.arguments["max_steps"], desc=job.recipe.label, unit="step")

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        self.meter.watch(optimizer)  # as it is now: a library may have put another in its place
        # A step that loss scaling skipped has not made optimizer states yet.
        warming_up = len(self.stopwatch.laps) - self.skipped_steps < WARM_UP_STEPS
        self.meter.attribute(warming_up or self.meter.enforces_cap)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        self.skipped_steps += bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.attribute(False)
        is_last = state.global_step == state.max_steps
        if is_last:  # resumed there, the Trainer would take one step too many
            control.should_save = False
        starts_or_ends_timing = is_last or len(self.stopwatch.laps) == WARM_UP_STEPS - 1
        if self.here.job.device.kind != "cpu" and starts_or_ends_timing:
            torch.accelerator.synchronize()
        self.stopwatch.lap(getattr(self.here.trainer, "tokens_seen", 0))
        self.bar.update()
        if time.monotonic() >= self.write_at_s:
            self.write()

    def on_evaluate(self, *args: Any, **others: Any) -> None:
        self.stopwatch.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if "loss" not in logs:
            return
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}")
        if not math.isfinite(logs["loss"]):
            self.losses_are_finite = False
            control.should_training_stop = True

    def on_save(self, *args: Any, **others: Any) -> None:
        self.write()  # beside each checkpoint

    def on_train_end(self, *args: Any, **others: Any) -> None:
        self.bar.close()

    def write(self) -> None:
        began_at_s = time.monotonic()
        self.here.write()
        written_at_s = time.monotonic()
        pause_s = max(WRITE_EVERY_S, (written_at_s - began_at_s) / WRITE_SHARE)
        self.write_at_s = written_at_s + min(pause_s, WRITE_WITHIN_S)

    def speed(self) -> dict[str, Any]:
        """Fields of a record: over the steps after the warm-up, padding not counted. Unknown (None) if there are none,
        or if the tracker slowed them."""
        if self.meter.enforces_cap:
            return {"timed_steps": 0}
        return self.stopwatch.speed()
