"""The callback that follows a run step by step: it times the steps, stops at a bad loss, and writes the record."""

import math
import time
from typing import Any

import torch
from transformers import TrainerCallback

from workbench.base.bar import progress_bar
from workbench.measure.meter import Meter
from workbench.training.ongoing import OngoingRun
from workbench.training.stopwatch import WARM_UP_STEPS, Stopwatch

# Seconds between two writes of the record, which a panel shows and a killed run leaves.
WRITE_EVERY_S = 0.5
# At most this share of the time is spent writing: the record of 100,000 steps takes a sixth of a second.
WRITE_SHARE = 0.02
# Seconds after which it is written all the same: a disk that was busy once must not leave the panel still for a minute.
WRITE_WITHIN_S = 5.0


class Watch(TrainerCallback):
    """A callback that switches the meter's tracker on for the warm-up steps and times the others, stops the training at
    a loss that is not finite, and writes the record every half second or so.

    A cap that the meter enforces keeps the tracker on in every step; then none is timed.
    """

    def __init__(self, run: OngoingRun, meter: Meter) -> None:
        self.run = run
        self.meter = meter
        self.losses_are_finite = True
        self.skipped_steps = 0
        self.write_at_s = time.monotonic() + WRITE_EVERY_S
        self.stopwatch = Stopwatch()
        self.bar = progress_bar(total=run.job.arguments["max_steps"], desc=run.job.recipe.label, unit="step")

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        self.meter.watch(optimizer)  # again in every step: a library may have put another in its place
        # A step that loss scaling skipped has not made optimizer states yet.
        warming_up = len(self.stopwatch.laps) - self.skipped_steps < WARM_UP_STEPS
        self.meter.set_tracking(warming_up or self.meter.enforces_cap)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **others: Any) -> None:
        self.skipped_steps += bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.set_tracking(False)
        is_last = state.global_step == state.max_steps
        if is_last:  # a run that is resumed from a checkpoint of the last step would take one step too many
            control.should_save = False
        starts_or_ends_timing = is_last or len(self.stopwatch.laps) == WARM_UP_STEPS - 1
        if self.run.job.device.kind != "cpu" and starts_or_ends_timing:
            torch.accelerator.synchronize()
        self.stopwatch.lap(getattr(self.run.trainer, "tokens_seen", 0))
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
        self.write()  # a record of this step, beside each checkpoint

    def on_train_end(self, *args: Any, **others: Any) -> None:
        self.bar.close()

    def write(self) -> None:
        """Write the record, and decide when to write it next: the longer it took, the later."""
        began_at_s = time.monotonic()
        self.run.write_progress()
        written_at_s = time.monotonic()
        pause_s = max(WRITE_EVERY_S, (written_at_s - began_at_s) / WRITE_SHARE)
        self.write_at_s = written_at_s + min(pause_s, WRITE_WITHIN_S)

    def speed(self) -> dict[str, Any]:
        """Return fields of a record: the speed of the steps after the warm-up, padding not counted. Only `timed_steps`,
        0, if there are none, or if the tracker slowed them."""
        if self.meter.enforces_cap:
            return {"timed_steps": 0}
        return self.stopwatch.speed()
