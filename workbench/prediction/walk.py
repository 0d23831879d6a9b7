"""The walk through a run's phases, the same for a prediction and for a measurement; and the measurement."""

import re
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from transformers import Trainer, TrainerCallback

from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.measure.allocators import allocator_for
from workbench.measure.tracker import Storage, StorageTracker
from workbench.models.load import quiet, save_model
from workbench.prediction.phases import Habits, Life, Peak
from workbench.prediction.rows import STEPS
from workbench.recipe import Recipe
from workbench.training.arguments import training_arguments
from workbench.training.job import UNMERGEABLE, prepare
from workbench.training.place import Values, load_for
from workbench.training.run import only_run
from workbench.training.trainer import SeamTrainer, assemble
from workbench.training.world import World, refuse_several_ranks


class PeakTracker(StorageTracker):
    """Bytes of the tensors on these kinds of devices, now and at most."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(kinds[0])
        self.kinds = kinds
        self.peak_bytes = 0

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in self.kinds and tensor.layout is torch.strided

    def _book(self, tensor: torch.Tensor) -> Storage | None:
        storage = super()._book(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return storage

    def take(self) -> int:
        """The peak since the last call."""
        peak_bytes = self.peak_bytes
        self.peak_bytes = self.live_bytes
        return peak_bytes


def resident_peak() -> int:
    """The peak of this process's resident memory since the last call. Only Linux tells it (VmHWM, which a 5 in
    clear_refs resets: `man 5 proc`); elsewhere what is resident now, a lower bound."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    return int(psutil.Process().memory_info().rss)


class NoMeter:
    """In place of the `Meter` that a Trainer tells of its phases, where a walk reads the memory by itself."""

    def watch(self, optimizer: Any) -> None:
        pass

    def see(self, tensors: Any) -> None:
        pass

    def attribute(self, on: bool) -> None:
        pass

    def enter_phase(self, phase: Any) -> None:
        pass

    def phase(self, phase: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _EnoughError(Exception):
    """So many tokens are generated: on an emulated card, generation would never see its end."""


@dataclass
class Walk(TrainerCallback):
    """A recipe through all phases; `now` is the present one, `peaks` are those of the phases that have ended.

    Args:
        on_device: allocated and reserved bytes at most since the last call.
        on_host: what the host held at most.
        load: the model, on the device.
        assemble: the Trainer of a model.
        scratch: for a checkpoint and the saved model.
    """

    recipe: Recipe
    habits: Habits
    device: torch.device
    on_device: Callable[[], tuple[int, int | None]]
    on_host: Callable[[], int]
    load: Callable[[], Any]
    assemble: Callable[[Any], SeamTrainer]
    scratch: Path
    now: str = ""
    peaks: list[Peak] = field(default_factory=list)

    def enter(self, phase: str) -> None:
        """From now on memory belongs to this phase; to none, if it has no name."""
        device_bytes = self.on_device()
        host_bytes = self.on_host()
        if self.now:
            self.peaks.append(Peak(self.now, *device_bytes, host_bytes))
        self.now = phase

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.now == "first step":  # from the second on, there are optimizer states
            self.enter("steady step")

    def run(self) -> None:
        """Raises ConfigurationError: new tokens leave no room for a prompt."""
        enter = self.enter
        length = self.recipe.sequence_length
        new = self.habits.max_new_tokens
        if new >= length:
            raise ConfigurationError(f"life: max_new_tokens must be below the sequence_length, {length}, got {new}.")
        enter("load")
        model = self.load()
        trainer = self._trainer(model, STEPS)
        enter("first step")
        trainer.train()
        enter("evaluate")
        trainer.evaluate()
        enter("generate")
        self._generate(model, length - new, new)
        if all(technique.can_be_resumed for technique in self.recipe.techniques):
            enter("checkpoint")
            Trainer._save_checkpoint(trainer, model, None)
            enter("")
            del model, trainer
            allocator_for(self.device).prepare()
            enter("resume")
            model = self.load()
            trainer = self._trainer(model, STEPS + 1)
            trainer.train(resume_from_checkpoint=str(self.scratch / f"checkpoint-{STEPS}"))
        enter("save")
        self._save(model)
        enter("")

    def _trainer(self, model: Any, steps: int) -> SeamTrainer:
        trainer = self.assemble(model)
        trainer.add_callback(self)
        trainer.put_longest_first()
        arguments = trainer.args
        arguments.eval_on_start = False
        arguments.max_steps = steps
        arguments.ignore_data_skip = True
        arguments.eval_accumulation_steps = self.habits.eval_accumulation_steps
        if not self.habits.prediction_loss_only:
            arguments.prediction_loss_only = False
            trainer.compute_metrics = lambda _: {}
        return trainer

    def _generate(self, model: Any, prompt: int, new: int) -> None:
        """One sequence of the recipe's length."""
        calls = iter(range(new - 1))

        def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            if next(calls, None) is None:
                raise _EnoughError
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        ids = torch.zeros((1, prompt), dtype=torch.long, device=self.device)
        model.eval()
        with quiet(), suppress(_EnoughError):
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                use_cache=self.habits.use_cache,
                stopping_criteria=[stop],
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        model.train()

    def _save(self, model: Any) -> None:
        """Whole weights, where the recipe's adapter can be merged into them."""
        whole = not any(technique.brings & UNMERGEABLE.keys() for technique in self.recipe.techniques)
        form = "merged" if whole else "adapter"
        # for tokenizer and source
        nothing: Any = SimpleNamespace(save_pretrained=lambda folder: None, name=self.recipe.model)
        save_model(model, nothing, nothing, form, self.scratch / "model")


def measure_life(recipe: Recipe, device: str, habits: Habits) -> Life:
    """Run every phase really: a few steps, an evaluation, a generation, a checkpoint, and go on from it.

    Nothing is recorded or kept; what other tensors hold on the device counts. Where memory runs out, the phases until
    then are there.

    Args:
        device: `"cpu"`, `"cuda"` or `"mps"`.

    Raises:
        ConfigurationError: something cannot be used; nothing was loaded.
        UnavailableError: this machine cannot run it, or not even load the model.
    """
    refuse_several_ranks()
    world = World.find(device)
    with only_run(recipe), ExitStack() as stack:
        job = prepare(recipe, world)
        if job.lacking:
            raise UnavailableError(job.lacking)
        allocator = allocator_for(world.device.torch)
        held_out = job.data["eval_dataset"]
        rows = [row % len(held_out) for row in range(habits.held_out_rows or len(held_out))]
        data = job.data | {"eval_dataset": held_out.select(rows)}
        for technique in job.recipe.techniques:
            stack.enter_context(technique.run_context())
        stack.enter_context(quiet())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        allocator.prepare()
        tracker = stack.enter_context(PeakTracker("cpu")) if device == "cpu" else None

        def load() -> Any:
            model = load_for(job, Values()).to(job.device.torch)  # type: ignore[arg-type]  # the stub takes no device
            if tracker:  # which has not seen weights that come out of a file
                tracker.label([*model.parameters(), *model.buffers()], Category.WEIGHTS)
            return model

        def assembled(model: Any) -> SeamTrainer:
            arguments = training_arguments(job.arguments | {"report_to": "none"}, job.device.kind, scratch)
            return assemble(job.recipe, model, data, arguments, cast("Any", NoMeter()), [])

        def on_device() -> tuple[int, int | None]:
            return (tracker.take(), None) if tracker else allocator.take_peaks()

        def on_host() -> int:
            return resident_peak() - before

        resident_peak()
        before = resident_peak()
        walk = Walk(job.recipe, habits, job.device.torch, on_device, on_host, load, assembled, scratch)
        with suppress(torch.OutOfMemoryError):
            walk.run()
    if not walk.peaks:
        raise UnavailableError(f"life: the model alone is too large for this {device}.")
    refused = (walk.now,) if walk.now else ()
    return Life(job.recipe, allocator.source, habits, tuple(walk.peaks), job.device.total_bytes, 0, refused)
