"""A prediction by the emulated GPU: the recipe's own run, a few steps of it, on PyTorch's own CUDA allocator.

Model, Trainer, evaluation before and after training, loss, clipping and optimizer are those of `run`; weights are
not: the model comes from its config, and nothing computes with them. All of this runs in a process under the emulator,
where torch sees the card as `cuda`.
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
from workbench.base.errors import ConfigurationError, explain_errors
from workbench.gpus.catalogue import ENOUGH_BYTES, Gpu
from workbench.gpus.emulator.padding import announce_padding
from workbench.measure.allocators import allocator_for
from workbench.measure.meter import Meter
from workbench.models.family import family_of
from workbench.models.load import count_parameters, load_model, quiet
from workbench.prediction.prediction import Prediction, make_prediction
from workbench.prediction.rank import as_rank
from workbench.prediction.rows import (
    MICRO_BATCHES,
    STEPS,
    add_mask,
    blocks_for,
    build_small_trainer,
    can_be_skeleton,
    job_for,
    material_for,
    replace_tensors,
    skeleton,
    trainer_facts,
)
from workbench.prediction.shadow.replay import maker_at
from workbench.prediction.shadow.tracker import ShadowTracker
from workbench.recipe import Recipe
from workbench.training.job import Job
from workbench.training.ranks.run import RankMeter, part_of
from workbench.training.ranks.shards import Ranks
from workbench.training.trainer import MeteredTrainer

DEVICE = torch.device("cuda")
HOST_STEP = torch.ops.aten._fused_adamw_.default  # the step of an optimizer that is offloaded to the host
ZEROS = torch.ops.aten.zeros_like.default


def too_much() -> ConfigurationError:
    """Return the error of a recipe that needs more memory than any GPU has."""
    return ConfigurationError(
        f"predict: a step of this recipe needs more than {format_bytes(ENOUGH_BYTES)}, "
        "which no GPU has. Lower effective_batch_size or sequence_length, "
        "or split the batch by gradient_accumulation."
    )


def predict_by_steps(recipe: Recipe, gpu: Gpu, padding: bool, ranks: Ranks | None) -> Prediction:
    """Predict a recipe: take a few steps of it on the card that this process sees, under the meter.

    Raises:
        ConfigurationError: the model, the length or a precision cannot be used.
        torch.OutOfMemoryError: the card has no room for the recipe.
    """
    with as_rank(ranks, DEVICE), card_job(recipe, ranks) as (job, scratch):
        model = card_model(job, ranks)
        tracker = CardTracker(getattr(model.config, "vocab_size", None))
        tracker.name_modules(model)
        meter = RankMeter(model, before_bytes=0, tracker=tracker)
        trainer, micro_batches = build_trainer_on_card(job, model, meter, scratch, [_Watch(tracker, meter)])
        tracker.untrained = max(micro_batches - MICRO_BATCHES, 0)
        trainer.args.max_steps = STEPS  # a technique may ask for more
        if padding:
            trainer.data_collator = partial(add_mask, cast("Any", trainer.data_collator))
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
        return make_prediction(
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
            **trainer_facts(trainer, counted, micro_batches, padded),
        )


@contextmanager
def card_job(recipe: Recipe, ranks: Ranks | None = None, **evaluated: Any) -> Iterator[tuple[Job, Path]]:
    """Prepare a job for this card, and yield it with an empty folder for what the run writes.

    A technique that the emulated GPU cannot run is replaced by its stand-in. Inside, the settings of the techniques'
    `run_context` hold.

    Args:
        ranks: the ranks that share the batch; None is a process alone.
        evaluated: the arguments of `blocks_for` that choose the rows of the evaluation.

    Raises ConfigurationError: the recipe cannot be emulated.
    """
    device = Device.find(DEVICE.type)
    techniques = []
    for technique in recipe.techniques:
        if technique.missing(device):
            technique = technique.stand_in()
        techniques.append(technique)
    recipe = replace(recipe, techniques=tuple(techniques))
    job = job_for(recipe, device, material_for(recipe, blocks_for(recipe, ranks=ranks, **evaluated)), ranks)
    if job.missing:
        raise ConfigurationError(f"predict: {job.missing}")
    allocator_for(DEVICE).prepare()
    cure = "Measure it with `run`, or leave out what brings this."
    with (
        explain_errors("predict: this recipe cannot be run on an emulated GPU", cure, torch.OutOfMemoryError),
        ExitStack() as stack,
    ):
        for technique in recipe.techniques:
            stack.enter_context(technique.run_context())
        stack.enter_context(quiet())
        yield job, Path(stack.enter_context(tempfile.TemporaryDirectory()))


def card_model(job: Job, ranks: Ranks | None = None) -> PreTrainedModel:
    """Make the recipe's model on the card.

    It is a skeleton that gets memory, without the detour over the host. A model that is sharded is made on the host,
    and this rank's part of it is moved, as in a run. Quantization acts while weights are loaded: such a model is made
    whole, and loaded.
    """
    recipe = job.recipe
    config = job.material.config
    arguments = recipe.model_arguments(family_of(config))
    if can_be_skeleton(config, arguments):
        model = recipe.prepare_model(skeleton(config, **arguments))
        if ranks and ranks.engine != "ddp":
            return part_of(allocate_tensors(model, torch.device("cpu")), ranks, DEVICE.type)
        return allocate_tensors(model, DEVICE)
    loading = dict(arguments)
    for name, value in arguments.items():
        if callable(value):
            loading[name] = value()
    if "device_map" in loading:
        # On the card quantizing takes no time, and what it leaves behind is freed before the run.
        loading["device_map"] = {"": DEVICE}
    with no_init_weights():  # nobody reads the weights
        model = load_model(replace(job.material.source, random=True), config, **loading)
    model = recipe.prepare_model(model)
    return cast("PreTrainedModel", model.to(DEVICE))


def allocate_tensors(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Give the parameters and buffers of a skeleton memory on a device, without content. Return the model."""

    def with_memory(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == device.type:
            return tensor
        return torch.empty_like(tensor, device=device)

    replace_tensors(model, with_memory)
    return model


class CardTracker(ShadowTracker):
    """The shadow's tracker on real tensors of the card, whose allocator counts scratch and workspaces by itself.

    Attributes:
        books: whether storages are booked now. If not, operations are only passed on, which is quick. Their tensors
            live exactly as long as under the tracker of a run, so that the allocator finds the same.
    """

    def __init__(self, vocabulary_size: int | None) -> None:
        super().__init__(vocabulary_size, cuda=False)
        self.books = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is HOST_STEP and not args[0][0].is_cuda:
            return None  # nobody reads the numbers, so that the host's memory need not be touched
        # An optimizer on the host makes its states by this operation; floating-point numbers tell them from masks.
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
    """The callback that tells the meter of each step, as a run's does.

    Only the last step, and whatever follows it, is booked.
    """

    tracker: CardTracker
    meter: Meter

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.tracker.books = state.global_step == state.max_steps - 1
        self.tracker.begin_step()
        self.meter.watch(optimizer)
        self.meter.set_tracking(True)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.meter.enter_phase(None)
        self.meter.set_tracking(False)


def build_trainer_on_card(
    job: Job, model: Any, meter: Any, scratch: Path, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[MeteredTrainer, int]:
    """Build the Trainer of a job whose model is on the card. It trains few micro-batches of each step.

    Returns:
        The Trainer, and how many micro-batches a step of the recipe has on each rank.
    """
    trainer, micro_batches = build_small_trainer(job, model, meter, DEVICE, scratch, callbacks)
    # Workers would fill the host's memory, anew at every evaluation, and the card would have nothing of it.
    trainer.args.dataloader_num_workers = 0
    cast("Any", trainer).training_step = few_micro_batches(trainer)
    return trainer, micro_batches


def few_micro_batches(trainer: MeteredTrainer) -> Callable[..., torch.Tensor]:
    """Return a Trainer's training step that trains the first micro-batches of each step and the last, and no others.

    From the second micro-batch on, each finds the memory that the one before it found. The inputs of all of them are on
    the card, as in a run.
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
    """Free the workspaces of cuBLAS' handles, and return the bytes that they had of the allocator."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
