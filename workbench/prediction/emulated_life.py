"""A run's life on an emulated GPU. Tensors on the host have sizes and no content there, and neither have files.

What a card copies to the host are zeros, which nobody reads: large copies take no memory, a saved model is a file with
a hole in place of its tensors (safetensors' format), and `torch.serialization.skip_data` leaves such holes for the
optimizer's states. Of the host that leaves out one state at a time, which `torch.save` brings there.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.base.patches import changed_environment
from workbench.base.patches.safetensors import files_written_by
from workbench.base.patches.transformers import arrays_made_by
from workbench.gpus.caching_allocator import ENOUGH_BYTES
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator import card
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for
from workbench.prediction.emulated import DEVICE, FewMicroBatches, card_model, on_card, too_much
from workbench.prediction.phases import Habits, Life
from workbench.prediction.rows import STEPS, assembled, blocks_for
from workbench.prediction.walk import NoMeter, PeakTracker, Walk
from workbench.recipe import Recipe
from workbench.training.trainer import SeamTrainer

LARGE = 2**20  # bytes of a copy to the host, from which on it has no content


class HostTracker(PeakTracker):
    """Tensors of the host; on `meta` are those that a model has before it is loaded."""

    def __init__(self) -> None:
        super().__init__("cpu", "meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func is torch.ops.aten._to_copy.default and args[0].is_cuda and args[0].nbytes >= LARGE
        func = _room if copied and (kwargs or {}).get("device") == torch.device("cpu") else func
        return super().__torch_dispatch__(func, types, args, kwargs)


def _room(tensor: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """For a copy on the host."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype)


@dataclass
class CardWalk(Walk):
    """On a card that has its own memory in a phase, or enough in those that have been `refused`."""

    gpu: Gpu = GPUS["t4"]
    refused: list[str] = field(default_factory=list)

    def enter(self, phase: str) -> None:
        super().enter(phase)
        if self.refused:  # which left more behind than this card would have
            torch.cuda.empty_cache()
            self.on_device()
        room = self.gpu.memory_bytes - self.gpu.context_bytes_estimate
        if torch.cuda.memory_allocated() > room and phase:
            self.refused += [phase] * (phase not in self.refused)
        memory = ENOUGH_BYTES if phase in self.refused else self.gpu.memory_bytes
        os.environ[card.VARIABLE] = card.variable(replace(self.gpu, memory_bytes=memory))  # read whenever asked for


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
        recipe,
        f"emulated:{gpu.name}",
        habits,
        tuple(walk.peaks),
        gpu.memory_bytes,
        gpu.context_bytes_estimate,
        tuple(refused),
    )


def _walked(recipe: Recipe, gpu: Gpu, habits: Habits, refused: list[str]) -> CardWalk:
    """The walk; where the card is too small, until then."""
    blocks = blocks_for(recipe, habits.held_out_rows, every=not habits.prediction_loss_only)
    with (
        changed_environment(),
        files_written_by(_write_hole),
        arrays_made_by(_without_content),
        on_card(recipe, blocks) as (job, scratch),
        HostTracker() as host,
    ):

        def assemble(model: Any) -> SeamTrainer:
            trainer, _ = assembled(job, model, cast("Any", NoMeter()), DEVICE, scratch)
            trainer.args.dataloader_num_workers = 0
            # as accelerate finds for a single process, after it has asked the card for the sizes
            cast("Any", trainer.accelerator).pad_across_processes = lambda tensor, **_: tensor
            cast("Any", trainer).training_step = FewMicroBatches(trainer)
            announce_padding(trainer)
            for name in ("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"):
                setattr(trainer, name, partial(_with_holes, trainer, getattr(trainer, name)))
            return trainer

        load = partial(card_model, job)
        peaks = allocator_for(DEVICE).take_peaks
        walk = CardWalk(job.recipe, habits, DEVICE, peaks, host.take, load, assemble, scratch, gpu=gpu, refused=refused)
        with suppress(torch.OutOfMemoryError):
            walk.run()
    return walk


def _without_content(numpify: Any, tensors: Any) -> Any:
    """Arrays on the host: of logits and labels the shape alone."""

    def shape(tensor: torch.Tensor) -> Any:
        if tensor.ndim < 2:
            return numpify(tensor)
        held = torch.empty_like(tensor, device="meta")
        return held.to(torch.float32) if held.dtype is torch.bfloat16 else held  # NumPy has no bf16

    return tree_map(shape, tensors)


def _with_holes(trainer: Any, move: Any, checkpoint: str | None) -> None:
    """Save the optimizer's states without content, or load them; counts of steps, which stay on the host, are set."""
    with torch.serialization.skip_data():
        move(checkpoint)
    for state in tree_leaves(trainer.optimizer.state_dict()):
        if isinstance(state, torch.Tensor) and state.device.type == "cpu":
            state.fill_(STEPS)


def _write_hole(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """A file of safetensors without its content (https://huggingface.co/docs/safetensors, "Format")."""
    header: dict[str, Any] = {"__metadata__": metadata or {}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.data_len
        header[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with Path(filename).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
