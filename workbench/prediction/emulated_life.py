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

from workbench.base.patches import changed_environment
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu
from workbench.gpus.emulator import card
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for
from workbench.models.load import quiet, save_model
from workbench.prediction.empty_host import HostTracker, host_without_content, with_holes
from workbench.prediction.emulated import DEVICE, assembled_on_card, card_job, card_model, too_much
from workbench.prediction.phases import Habits, Life, Peak
from workbench.prediction.rows import STEPS
from workbench.recipe import Recipe
from workbench.training.job import UNMERGEABLE, Job
from workbench.training.trainer import SeamTrainer


def life_here(recipe: Recipe, gpu: Gpu, habits: Habits) -> Life:
    """The life on the card that this process sees. Raises ConfigurationError as a prediction does."""
    refused: list[str] = []
    walk = _walked(recipe, gpu, habits, refused)
    while walk.now:  # it ended within this phase: once more, with enough memory there
        if walk.now in refused:
            raise too_much()
        refused.append(walk.now)
        walk = _walked(recipe, gpu, habits, refused)
    return Life(
        recipe=recipe,
        source=f"emulated:{gpu.name}",
        habits=habits,
        peaks=tuple(walk.peaks),
        capacity_bytes=gpu.memory_bytes,
        context_bytes=gpu.context_bytes_estimate,
        refused=tuple(refused),
    )


def _walked(recipe: Recipe, gpu: Gpu, habits: Habits, refused: list[str]) -> "Walk":
    """The walk; where the card is too small, until then."""
    with (
        changed_environment(),
        card_job(recipe, held_out=habits.held_out_rows, every=not habits.prediction_loss_only) as (job, scratch),
        host_without_content() as host,
    ):
        walk = Walk(job, habits, scratch, host, gpu, refused)
        with suppress(torch.OutOfMemoryError):
            walk.run()
    return walk


@dataclass(eq=False)
class Walk(TrainerCallback):
    """A job through all phases, on a card that has its own memory in a phase, or enough in those that are `refused`.

    `now` is the present phase, `peaks` are those of the phases that have ended.

    Args:
        scratch: for a checkpoint and the saved model.
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
        """Through all of them, or until memory runs out."""
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

    # ---- whose memory it is ----

    def enter(self, phase: str) -> None:
        """From now on memory belongs to this phase; to none, if it has no name."""
        allocated, reserved = self.device_peaks()
        host_bytes = self.host_peak()
        if self.now:
            self.peaks.append(Peak(self.now, allocated, reserved or allocated, host_bytes))
        self.now = phase
        self.give_memory(phase)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.now == "first step":  # from the second on, there are optimizer states
            self.enter("steady step")

    def device_peaks(self) -> tuple[int, int | None]:
        """Allocated and reserved bytes at most since the last call."""
        return allocator_for(self.device).take_peaks()

    def host_peak(self) -> int:
        return self.host.take()

    def give_memory(self, phase: str) -> None:
        """The card's own, or enough. A phase that finds more tensors than this card has room for is refused."""
        if self.refused:  # which left more behind than this card would have
            torch.cuda.empty_cache()
            self.device_peaks()
        room = self.gpu.memory_bytes - self.gpu.context_bytes_estimate
        if torch.cuda.memory_allocated() > room and phase and phase not in self.refused:
            self.refused.append(phase)
        gpu = self.gpu
        if phase in self.refused:
            gpu = replace(gpu, memory_bytes=ENOUGH_BYTES)
        os.environ[card.VARIABLE] = card.variable(gpu)  # read whenever asked for

    # ---- what is done in them ----

    def load(self) -> Any:
        return card_model(self.job)

    def assemble(self, model: Any) -> SeamTrainer:
        trainer, _ = assembled_on_card(self.job, model, NoMeter(), self.scratch)
        # as accelerate finds for a single process, after it has asked the card for the sizes
        cast("Any", trainer.accelerator).pad_across_processes = lambda tensor, **_: tensor
        announce_padding(trainer)
        for name in ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
            setattr(trainer, name, partial(with_holes, trainer, getattr(trainer, name)))
        return trainer

    def trainer_for(self, model: Any, steps: int) -> SeamTrainer:
        """With the habits, for so many steps."""
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

    def generate(self, model: Any) -> None:
        """One sequence of the recipe's length. On an emulated card generation would never see its end."""
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
        """Whole weights, where the recipe's adapter can be merged into them."""
        recipe = self.job.recipe
        form = "merged"
        if any(technique.brings & UNMERGEABLE.keys() for technique in recipe.techniques):
            form = "adapter"
        # for tokenizer and source
        nothing: Any = SimpleNamespace(save_pretrained=lambda folder: None, name=recipe.model)
        save_model(model, nothing, nothing, form, self.scratch / "model")


class NoMeter:
    """In place of the `Meter` that a Trainer tells of its phases, where a walk reads the memory by itself."""

    def ignore(self, *_: Any) -> None:
        pass

    watch = ignore
    see = ignore
    attribute = ignore
    enter_phase = ignore

    def phase(self, _: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _EnoughError(Exception):
    """So many tokens are generated."""
