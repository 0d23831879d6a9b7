"""Measure a run's life: the phases of `predict --life` really run, which are a few steps, an evaluation, a generation,
a checkpoint, and a start from it. `python tools/measured_life.py gpt2-tiny cpu`, or a folder's model and `cuda`.

`tests/prediction/test_life.py` holds the predicted life against it; `data/reference/h100/life.csv` is five such lives.
"""

import argparse
import re
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from workbench import Recipe
from workbench.base.categories import Category
from workbench.base.errors import UnavailableError
from workbench.measure.allocators import allocator_for
from workbench.models.load import quiet
from workbench.prediction.empty_host import HostTracker
from workbench.prediction.emulated_life import NoMeter, Walk
from workbench.prediction.phases import Habits, Peak
from workbench.training.arguments import build_training_arguments
from workbench.training.job import Job, prepare
from workbench.training.ongoing import DeviceBehaviour
from workbench.training.run import only_run
from workbench.training.trainer import MeteredTrainer, build_trainer
from workbench.training.world import World


def measure_life(recipe: Recipe, device: str, habits: Habits) -> tuple[Peak, ...]:
    """Run the phases of a life, and return the peaks of each, until memory runs out.

    A peak is the most bytes on the device, and by how much the process's resident memory had grown since before the
    load.

    Raises:
        ConfigurationError: something cannot be used; nothing was loaded.
        UnavailableError: this machine cannot run it.
    """
    with only_run(recipe), ExitStack() as stack:
        job = prepare(recipe, World.find(device))
        if job.missing:
            raise UnavailableError(job.missing)
        for technique in job.recipe.techniques:
            stack.enter_context(technique.run_context())
        stack.enter_context(quiet())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        allocator_for(job.device.torch).prepare()
        tracker = DeviceTracker()
        if device == "cpu":
            stack.enter_context(tracker)
        walk = MeasuredWalk(job, habits, scratch, tracker)
        with suppress(torch.OutOfMemoryError):
            walk.run()
    return tuple(walk.peaks)


class DeviceTracker(HostTracker):
    """The tracker of a CPU's tensors, since a CPU has no allocator to ask."""

    kinds = ("cpu",)


class MeasuredWalk(Walk):
    def __init__(self, job: Job, habits: Habits, scratch: Path, tracker: DeviceTracker) -> None:
        self.job = job
        self.habits = habits
        self.scratch = scratch
        self.host = tracker
        self.device = job.device.torch
        self.now = ""
        self.peaks = []
        resident_peak()
        self.resident_before = resident_peak()

    def device_peaks(self) -> tuple[int, int | None]:
        if self.device.type == "cpu":
            return self.host.take(), None
        return allocator_for(self.device).take_peaks()

    def host_peak(self) -> int:
        return resident_peak() - self.resident_before

    def give_memory(self, phase: str) -> None:
        pass  # a real device has the memory that it has

    def load(self) -> Any:
        model = DeviceBehaviour().load(self.job).to(self.device)
        if self.device.type == "cpu":  # the tracker has not seen weights that come out of a file
            self.host.label([*model.parameters(), *model.buffers()], Category.WEIGHTS)
        return model

    def build_trainer(self, model: Any) -> MeteredTrainer:
        held_out = self.job.data["eval_dataset"]
        count = self.habits.held_out_rows or len(held_out)
        rows = [row % len(held_out) for row in range(count)]  # more rows than there are begin again at the first
        data = self.job.data | {"eval_dataset": held_out.select(rows)}
        settings = self.job.arguments | {"report_to": "none"}
        arguments = build_training_arguments(settings, self.device.type, self.scratch)
        return build_trainer(self.job.recipe, model, data, arguments, NoMeter(), [])


def resident_peak() -> int:
    """Return the peak of this process's resident memory since the last call, in bytes.

    Only Linux tells it (VmHWM, which a 5 in clear_refs resets: `man 5 proc`). Elsewhere it is what is resident now, a
    lower bound.
    """
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    return int(psutil.Process().memory_info().rss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("device", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--settings", default="", help="as `predict --life` takes them")
    args = parser.parse_args()
    for peak in measure_life(Recipe(model=args.model), args.device, Habits.parse(args.settings)):
        print(f"{peak.phase:14}{peak.allocated_bytes:>16,}{peak.reserved_bytes:>16,}{peak.host_bytes:>16,}")


if __name__ == "__main__":
    main()
