"""A prediction by the emulated GPU: the recipe's own run, a few steps of it, on PyTorch's own CUDA allocator.

Model, Trainer, evaluation before and after training, loss, clipping and optimizer are those of `run`; weights are
not: the model comes from its config, and nothing computes with them. Everything here but `compute_emulated` runs in a
process under the emulator, where torch sees the card as `cuda`.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.initialization import no_init_weights

from workbench.base.categories import Category, format_bytes
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, explained
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for
from workbench.measure.meter import Meter
from workbench.models.family import family_of
from workbench.models.load import count_parameters, load_model, quiet
from workbench.prediction.prediction import Prediction, prediction_of
from workbench.prediction.rank import as_rank
from workbench.prediction.rows import (
    MICRO_BATCHES,
    STEPS,
    assembled,
    blocks_for,
    can_be_skeleton,
    facts,
    give_tensors,
    job_for,
    masked,
    material_for,
    skeleton,
)
from workbench.prediction.shadow.replay import maker_at
from workbench.prediction.shadow.tracker import ShadowTracker
from workbench.recipe import Recipe
from workbench.training.job import Job
from workbench.training.ranks.run import RankMeter, part_of
from workbench.training.ranks.shards import Ranks
from workbench.training.trainer import SeamTrainer

DEVICE = torch.device("cuda")
HOST_STEP = torch.ops.aten._fused_adamw_.default
ZEROS = torch.ops.aten.zeros_like.default


def too_much() -> ConfigurationError:
    """What no GPU has room for."""
    return ConfigurationError(
        f"predict: a step of this recipe needs more than {format_bytes(ENOUGH_BYTES)}, "
        "which no GPU has. Lower effective_batch_size or sequence_length, "
        "or split the batch by gradient_accumulation."
    )


def predict_here(recipe: Recipe, gpu: Gpu, padding: bool, ranks: Ranks | None) -> Prediction:
    """A few steps of the recipe on the card that this process sees, under the meter.

    Raises:
        ConfigurationError: the model, the length or a precision cannot be used.
        torch.OutOfMemoryError: the card has no room for it.
    """
    with as_rank(ranks, DEVICE), card_job(recipe, ranks) as (job, scratch):
        model = card_model(job, ranks)
        tracker = CardTracker(getattr(model.config, "vocab_size", None))
        tracker.name_modules(model)
        meter = RankMeter(model, before_bytes=0, tracker=tracker)
        trainer, micro_batches = assembled_on_card(job, model, meter, scratch, [_Watch(tracker, meter)])
        tracker.untrained = max(micro_batches - MICRO_BATCHES, 0)
        trainer.args.max_steps = STEPS  # a technique may ask for more
        if padding:
            trainer.data_collator = partial(masked, cast("Any", trainer.data_collator))
        padded = announce_padding(trainer, padding)
        counted = count_parameters(model)
        with meter:
            trainer.put_longest_first()
            trainer.train()
            trainer.evaluate()
        workspaces = _workspace_bytes()
        report = meter.report()
        trace = tracker.trace()
        timeline = trace.timeline(trace.nbytes)
        return prediction_of(
            recipe,
            gpu,
            "emulated",
            ranks,
            peak_allocated_bytes=report.peak_allocated_bytes,
            peak_reserved_bytes=report.peak_reserved_bytes,
            peak_phase=report.peak_phase,
            by_category=report.by_category,
            maximum_by_category=report.maximum_by_category,
            by_phase=report.by_phase,
            peak_operation=maker_at(trace, trace.nbytes, timeline.peak(report.peak_phase)),
            work=trace.work,
            workspace_bytes=workspaces,
            timeline=timeline,
            **facts(trainer, counted, micro_batches, padded),
        )


@contextmanager
def card_job(recipe: Recipe, ranks: Ranks | None = None, **evaluated: Any) -> Iterator[tuple[Job, Path]]:
    """What surrounds a run: the job of the recipe as it can be emulated, and a folder.

    Args:
        evaluated: which rows, as `blocks_for` has it.

    Raises ConfigurationError: it cannot be.
    """
    device = Device.find(DEVICE.type)
    techniques = []
    for technique in recipe.techniques:
        if technique.missing(device):
            technique = technique.stand_in()
        techniques.append(technique)
    recipe = replace(recipe, techniques=tuple(techniques))
    job = job_for(recipe, device, material_for(recipe, blocks_for(recipe, ranks=ranks, **evaluated)), ranks)
    if job.lacking:
        raise ConfigurationError(f"predict: {job.lacking}")
    allocator_for(DEVICE).prepare()
    cure = "Measure it with `run`, or leave out what brings this."
    with (
        explained("predict: this recipe cannot be run on an emulated GPU", cure, torch.OutOfMemoryError),
        ExitStack() as stack,
    ):
        for technique in recipe.techniques:
            stack.enter_context(technique.run_context())
        stack.enter_context(quiet())
        yield job, Path(stack.enter_context(tempfile.TemporaryDirectory()))


def card_model(job: Job, ranks: Ranks | None = None) -> PreTrainedModel:
    """On the card; of a model that is sharded, this rank's part, cut from the host's as in a run. Quantization acts
    while weights are loaded: such a model is made whole, and loaded."""
    recipe = job.recipe
    config = job.material.config
    arguments = recipe.model_arguments(family_of(config))
    if can_be_skeleton(config, arguments):
        model = recipe.prepare_model(skeleton(config, **arguments))
        if ranks and ranks.engine != "ddp":
            return part_of(given_memory(model, torch.device("cpu")), ranks, DEVICE.type)
        return given_memory(model, DEVICE)
    loading = dict(arguments)
    for name, value in arguments.items():
        if callable(value):
            loading[name] = value()
    if "device_map" in loading:
        # quantizing costs nothing there, and its traces are swept before the run
        loading["device_map"] = {"": DEVICE}
    with no_init_weights():  # nobody reads them
        model = load_model(replace(job.material.source, random=True), config, **loading)
    model = recipe.prepare_model(model)
    return cast("PreTrainedModel", model.to(DEVICE))


def given_memory(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A skeleton whose parameters and buffers have memory."""

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == device.type:
            return tensor
        return torch.empty_like(tensor, device=device)

    give_tensors(model, with_memory)
    return model


class CardTracker(ShadowTracker):
    """The shadow's tracker on true tensors of the card, whose kernels' scratch and workspaces are no guess.

    Attributes:
        books: whether it keeps books now. Without, it only passes operations on, which is quick: their tensors live
            exactly as long as under the tracker of a run, so that the allocator finds the same.
    """

    def __init__(self, vocabulary_size: int | None) -> None:
        super().__init__(vocabulary_size, cuda=False)
        self.books = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is HOST_STEP and not args[0][0].is_cuda:
            return None  # nobody reads the numbers, and the host's memory is not touched for them
        # its states, no mask
        if func is ZEROS and not args[0].is_cuda and args[0].is_floating_point():
            func = torch.ops.aten.empty_like.default
        if self.books:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        if self.books:
            super().label(tensors, category)

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and tensor.layout is torch.strided


@dataclass(eq=False)
class _Watch(TrainerCallback):
    """As that of a run: each step has its phases, under the tracker; the books are of the last and what follows it."""

    tracker: CardTracker
    meter: Meter

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.tracker.books = state.global_step == state.max_steps - 1
        self.tracker.begin_step()
        self.meter.watch(optimizer)
        self.meter.attribute(True)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.attribute(False)


def assembled_on_card(
    job: Job, model: Any, meter: Any, scratch: Path, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[SeamTrainer, int]:
    """As `assembled`, with the model on the card: of a step's micro-batches few are trained."""
    trainer, micro_batches = assembled(job, model, meter, DEVICE, scratch, callbacks)
    # they only fill the host's memory, anew at every evaluation
    trainer.args.dataloader_num_workers = 0
    cast("Any", trainer).training_step = few_micro_batches(trainer)
    return trainer, micro_batches


def few_micro_batches(trainer: SeamTrainer) -> Callable[..., torch.Tensor]:
    """The training step of a Trainer, for the first micro-batches of a step and the last: the others are not trained.

    From the second on, each finds what the one before it found. All of them are on the card, as in a run.
    """
    train = trainer.training_step
    done = 0

    def train_few(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal done
        done += 1
        if trainer.accelerator.sync_gradients:  # the last of a step
            done = 0
        if done < MICRO_BATCHES:
            return train(*args, **kwargs)
        return torch.zeros((), device=DEVICE)

    return train_few


def _workspace_bytes() -> int:
    """What cuBLAS' handles have of the allocator, given back."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
