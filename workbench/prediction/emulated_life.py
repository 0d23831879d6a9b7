"""A run's life on an emulated GPU: the recipe's own Trainer, from loading to saving."""

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import Trainer, TrainerCallback

from workbench.base.patches import change_environment
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu
from workbench.gpus.emulator import card
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for
from workbench.models.load import quiet, save_model
from workbench.prediction.empty_host import HostTracker, host_without_content, move_without_content
from workbench.prediction.emulated import DEVICE, build_trainer_on_card, card_job, card_model, too_much
from workbench.prediction.phases import Habits, Life, Peak
from workbench.prediction.rows import STEPS
from workbench.recipe import Recipe
from workbench.training.job import WHY_UNMERGEABLE, Job
from workbench.training.trainer import MeteredTrainer


def predict_phases(recipe: Recipe, gpu: Gpu, habits: Habits) -> Life:
    """Predict every phase of a run on the card that this process sees.

    Raises ConfigurationError: the recipe cannot be used, or a phase needs more memory than any GPU has.
    """
    refused: list[str] = []
    walk = _walk(recipe, gpu, habits, refused)
    while walk.now:  # memory ran out within this phase: walk once more, with enough of it there
        if walk.now in refused:
            raise too_much()
        refused.append(walk.now)
        walk = _walk(recipe, gpu, habits, refused)
    return Life(
        recipe=recipe,
        source=f"emulated:{gpu.name}",
        habits=habits,
        peaks=tuple(walk.peaks),
        capacity_bytes=gpu.memory_bytes,
        context_bytes=gpu.context_bytes_estimate,
        refused=tuple(refused),
    )


def _walk(recipe: Recipe, gpu: Gpu, habits: Habits, refused: list[str]) -> "Walk":
    """Take a job through its phases, as far as the card's memory goes, and return the walk."""
    with (
        change_environment(),
        card_job(recipe, held_out=habits.held_out_rows, every=not habits.prediction_loss_only) as (job, scratch),
        host_without_content() as host,
    ):
        walk = Walk(job, habits, scratch, host, gpu, refused)
        with suppress(torch.OutOfMemoryError):
            walk.run()
    return walk


@dataclass(eq=False)
class Walk(TrainerCallback):
    """The walk of a job through all phases of its life.

    Args:
        scratch: the folder for a checkpoint and the saved model.
        host: the tracker of the host's tensors.
        refused: the phases in which the card has enough memory. In all others it has its own.
        now: the present phase; empty between the phases.
        peaks: the peaks of the phases that have ended.
    """

    job: Job
    habits: Habits
    scratch: Path
    host: HostTracker
    gpu: Gpu
    refused: list[str]
    device: torch.device = DEVICE
    now: str = ""
    peaks: list[Peak] = field(default_factory=list)

    def run(self) -> None:
        """Walk through all phases, or until memory runs out."""
        enter = self.enter
        enter("load")
        model = self.load()
        trainer = self.trainer_for(model, STEPS)
        enter("first step")
        trainer.train()
        enter("evaluate")
        trainer.evaluate()
        enter("generate")
        self.generate(model)
        if all(technique.can_be_resumed for technique in self.job.recipe.techniques):
            enter("checkpoint")
            Trainer._save_checkpoint(trainer, model, None)
            enter("")
            del model, trainer
            allocator_for(self.device).prepare()
            enter("resume")
            model = self.load()
            trainer = self.trainer_for(model, STEPS + 1)
            trainer.train(resume_from_checkpoint=str(self.scratch / f"checkpoint-{STEPS}"))
        enter("save")
        self.save(model)
        enter("")

    # ---- the memory of a phase ----

    def enter(self, phase: str) -> None:
        """End the present phase with its peak, and begin this one. An empty name begins none."""
        allocated, reserved = self.device_peaks()
        host_bytes = self.host_peak()
        if self.now:
            self.peaks.append(Peak(self.now, allocated, reserved or allocated, host_bytes))
        self.now = phase
        self.give_memory(phase)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.now == "first step":  # later steps have optimizer states, which the first one makes
            self.enter("steady step")

    def device_peaks(self) -> tuple[int, int | None]:
        """Return the most allocated and the most reserved bytes since the last call.

        A device without a caching allocator reserves None.
        """
        return allocator_for(self.device).take_peaks()

    def host_peak(self) -> int:
        """Return the most bytes of the host's tensors since the last call."""
        return self.host.take()

    def give_memory(self, phase: str) -> None:
        """Let the card have its own memory in this phase, or enough.

        A phase that begins with more tensors than this card has room for is refused too.
        """
        if self.refused:  # such a phase leaves more cached memory behind than this card could
            torch.cuda.empty_cache()
            self.device_peaks()
        room = self.gpu.memory_bytes - self.gpu.context_bytes_estimate
        if torch.cuda.memory_allocated() > room and phase and phase not in self.refused:
            self.refused.append(phase)
        gpu = self.gpu
        if phase in self.refused:
            gpu = replace(gpu, memory_bytes=ENOUGH_BYTES)
        os.environ[card.VARIABLE] = card.variable(gpu)  # the emulated driver reads it whenever it is asked for memory

    # ---- the work of the phases ----

    def load(self) -> Any:
        return card_model(self.job)

    def build_trainer(self, model: Any) -> MeteredTrainer:
        trainer, _ = build_trainer_on_card(self.job, model, NoMeter(), self.scratch)
        # accelerate leaves tensors of a single process as they are, too, but asks the card for their sizes first
        cast("Any", trainer.accelerator).pad_across_processes = lambda tensor, **_: tensor
        announce_padding(trainer)
        for name in ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
            setattr(trainer, name, partial(move_without_content, trainer, getattr(trainer, name)))
        return trainer

    def trainer_for(self, model: Any, steps: int) -> MeteredTrainer:
        """Return a Trainer with the user's habits, for so many steps."""
        trainer = self.build_trainer(model)
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

    def generate(self, model: Any) -> None:
        """Generate one sequence of the recipe's length.

        Its last tokens are counted here: an emulated card computes no values, so that transformers would never see the
        end of a sequence.
        """
        new = self.habits.max_new_tokens
        prompt = self.job.recipe.sequence_length - new
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

    def save(self, model: Any) -> None:
        """Save the model: whole weights, where the recipe's adapter can be merged into them, or else the adapter."""
        recipe = self.job.recipe
        form = "merged"
        if any(technique.brings & WHY_UNMERGEABLE.keys() for technique in recipe.techniques):
            form = "adapter"
        # `save_model` saves the tokenizer too, and names the source; a walk has neither
        nothing: Any = SimpleNamespace(save_pretrained=lambda folder: None, name=recipe.model)
        save_model(model, nothing, nothing, form, self.scratch / "model")


class NoMeter:
    """A stand-in for the `Meter` that a Trainer tells of its phases. A walk reads the memory by itself."""

    def ignore(self, *_: Any) -> None:
        pass

    watch = ignore
    label_inputs = ignore
    set_tracking = ignore
    enter_phase = ignore

    def phase(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _EnoughError(Exception):
    """The generation has as many tokens as were asked for."""
