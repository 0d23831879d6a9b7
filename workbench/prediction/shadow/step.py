"""A recipe's training step on fake tensors: the real model, Trainer, loss, clipping and optimizer compute nothing."""

import math
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader
from transformers.integrations.neftune import activate_neftune

from workbench.base.categories import Phase
from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.unforeseen import describe, find_failing_forward
from workbench.gpus.catalogue import Gpu
from workbench.measure.meter import Meter
from workbench.models.family import family_of
from workbench.models.load import count_parameters, quiet
from workbench.prediction.rank import as_rank
from workbench.prediction.rows import (
    MICRO_BATCHES,
    STEPS,
    Batch,
    add_mask,
    blocks_for,
    build_small_trainer,
    job_for,
    material_for,
    skeleton,
    trainer_facts,
)
from workbench.prediction.shadow.attention import choose_backend
from workbench.prediction.shadow.patches import cuda_choices, make_fake, scale_losses, traceable
from workbench.prediction.shadow.trace import Trace, foresee
from workbench.prediction.shadow.tracker import ShadowTracker
from workbench.recipe import Recipe
from workbench.training.ranks.run import RankMeter
from workbench.training.ranks.shard import mesh_of, shard_fully
from workbench.training.ranks.shards import SHARDS, Ranks
from workbench.training.trainer import MeteredTrainer, count_padding, row_lengths

DEVICE = torch.device("cpu")  # plays the GPU
# Pauses of `train` that a trace needs before the rest can be foreseen. The first two enclose the first evaluation. The
# third is after the first step, the fourth after the second.
PAUSES_BEFORE_FORESIGHT = 4

TRACES: deque[tuple[Any, Trace]] = deque(maxlen=32)  # the newest traces, each behind the request that it answers


def trace_for(recipe: Recipe, gpu: Gpu | None, padding: bool, ranks: Ranks | None = None) -> Trace:
    """Return a trace of the recipe's step: an earlier one if this GPU chooses every kernel alike, or a new one.

    Arguments and errors are those of `trace`.
    """
    request = (recipe, gpu is not None, padding, ranks)
    for earlier_request, earlier in TRACES:
        if earlier_request != request:
            continue
        if gpu is None or earlier.attention == {
            question: choose_backend(gpu, question) for question in earlier.attention
        }:
            return earlier
    new = trace(recipe, gpu, padding, ranks)
    TRACES.append((request, new))
    return new


def trace(recipe: Recipe, gpu: Gpu | None, padding: bool = False, ranks: Ranks | None = None) -> Trace:
    """Run a few optimizer steps of the recipe in the shadow, with an evaluation before and after them.

    Args:
        gpu: the GPU whose choices of kernels are made; None for the CPU's own.
        padding: whether batches contain padding although nothing in the recipe says so.
        ranks: the ranks that share the batch; the trace is that of one of them. None is a process alone.

    Raises:
        ConfigurationError: the model or the length cannot be used, or an operation cannot be traced.
    """
    refuse_offloading(gpu, ranks)
    recipe = replace(recipe, techniques=tuple(technique.stand_in() for technique in recipe.techniques))
    material = material_for(recipe, blocks_for(recipe, ranks=ranks))
    tracker = ShadowTracker(material.config.vocab_size, cuda=gpu is not None)
    with ExitStack() as stack:
        stack.enter_context(_name_failures(tracker))
        stack.enter_context(quiet())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(as_rank(ranks, DEVICE))

        # Adapters cannot be added to a model of fake tensors, so that the techniques change a skeleton first.
        job = job_for(recipe, gpu.device if gpu else Device.find("cpu"), material, ranks)
        model = recipe.prepare_model(skeleton(material.config, **recipe.model_arguments(family_of(material.config))))
        tracker.name_modules(model)
        counted = count_parameters(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        make_fake(model, mode, DEVICE)
        if ranks and ranks.engine == "fsdp":
            mesh = mesh_of(DEVICE.type, ranks.count)  # reads values of its own, which fake tensors do not have
            with mode:
                shard_fully(model, ranks.shard, mesh)

        meter = RankMeter(model, before_bytes=0, tracker=tracker)
        trainer, micro_batches = build_small_trainer(job, model, meter, DEVICE, scratch)
        tracker.untrained = max(micro_batches - MICRO_BATCHES, 0)
        if trainer.args.fp16:
            scale_losses(trainer)

        batches = _batches(trainer, padding)
        padded = padding or any(map(count_padding, batches))
        held_out = DataLoader(
            cast("Any", trainer.eval_dataset),
            batch_size=trainer.args.per_device_eval_batch_size,
            collate_fn=trainer.data_collator,
        )
        evaluated = [_fake_batch(batch, mode) for batch in held_out]
        trained = [_fake_batch(batch, mode) for batch in batches]
        stack.enter_context(traceable(lambda: padded and model.training))
        attention = stack.enter_context(cuda_choices(gpu)) if gpu else None
        stack.enter_context(mode)
        stack.enter_context(meter)
        trace_of_steps = _trace_pauses(tracker, train(trainer, meter, trained, evaluated))

    allocator: dict[str, Any] = {}
    for technique in recipe.techniques:
        allocator |= technique.allocator_settings()
    return replace(
        trace_of_steps,
        allocator=allocator,
        attention=attention.answers if attention else {},
        facts=trainer_facts(trainer, counted, micro_batches, padded),
    )


def _trace_pauses(tracker: ShadowTracker, training: Iterator[None]) -> Trace:
    """Drive a training from pause to pause, and return its trace.

    The training is left unfinished where the rest can be foreseen from the second step and the first evaluation.
    """
    pauses: list[int] = []  # readings of the event clock
    for _ in training:
        pauses.append(tracker.events)
        if len(pauses) == PAUSES_BEFORE_FORESIGHT:
            evaluation = (pauses[0], pauses[1])
            step = (pauses[-2], pauses[-1])
            whole = foresee(tracker.trace(), evaluation, step)
            if whole:
                return whole
        # The fifth pause ends the last step, whose work the trace has: it is not reset any more.
        if len(pauses) <= PAUSES_BEFORE_FORESIGHT:
            tracker.begin_step()
    return tracker.trace()


@contextmanager
def _name_failures(tracker: ShadowTracker) -> Iterator[None]:
    """Turn whatever fails in the shadow into an error that names the operation and the module."""
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as error:
        # PyTorch has errors of its own for an operation that needs values; a built-in one is about the model.
        is_of_model = type(error).__module__ == "builtins" and not isinstance(error, NotImplementedError)
        if is_of_model and find_failing_forward(error):
            raise ConfigurationError(
                f"predict: {describe(error).sentence}. Correct the config or the code of the model. "
                "If it runs with transformers alone, measure it with `run` instead."
            ) from error
        operation, module = tracker.failed
        place = operation or "the assembly of the trainer"
        if module:
            place += f" in {module}"
        first, *_ = str(error).splitlines() or [""]
        raise ConfigurationError(
            "predict: this recipe cannot be traced without a device: "
            f"{type(error).__name__} at {place}: {first} Measure it with `run` instead, "
            "or leave out the technique that brings this operation."
        ) from error


def refuse_offloading(gpu: Gpu | None, ranks: Ranks | None) -> None:
    """Refuse shards that the shadow cannot hold.

    Raises ConfigurationError: the shards wait on the GPU's host, and the shadow's tensors are all on one device; or
    they are DeepSpeed's, which has never been made to take fake tensors.
    """
    if ranks and (ranks.engine == "deepspeed" or (gpu and SHARDS[ranks.shard].get("offload"))):
        raise ConfigurationError(
            f"shard: the shadow cannot predict {ranks.shard}, which needs the emulated GPU. "
            "Run make emulator once and name a GPU, or take --shard full."
        )


def train(
    trainer: MeteredTrainer,
    meter: Meter,
    batches: list[Batch],
    held_out: Sequence[Batch] = (),
) -> Iterator[None]:
    """Make the calls of `Trainer.train` that have to do with memory, in its order, pausing between them.

    `tests/prediction/test_order_of_calls.py` holds the order against the Trainer, whose own loop needs a device, values
    to log and a data loader. The caller iterates over the pauses: one at the beginning, and one after each evaluation
    and each step.
    """
    if trainer.neftune_noise_alpha is not None:
        activate_neftune(trainer.model, trainer.neftune_noise_alpha, trainer.accelerator)
    trainer.create_optimizer()
    # The optimizer is not moved: it is on the device already, and a rate that is a fake tensor cannot be copied.
    model, trainer.optimizer = trainer.accelerator.prepare(
        trainer.model, trainer.optimizer, device_placement=[True, False]
    )
    trainer.model_wrapped = model
    trainer._tr_loss = torch.zeros((), device=DEVICE)
    model.zero_grad()
    yield  # before the first evaluation
    evaluate(trainer, meter, held_out)
    yield from _train_steps(trainer, meter, batches)  # pauses before each step
    yield  # after the last step, before the second evaluation
    evaluate(trainer, meter, held_out)
    yield  # at the end


def _train_steps(trainer: Any, meter: Meter, batches: list[Batch]) -> Iterator[None]:
    """Take STEPS steps, pausing before each. Its batch, loss and norm stay alive until the next step replaces them."""
    model = trainer.model_wrapped
    for _ in range(STEPS):
        yield
        moved = map(_move, batches)
        samples, items = trainer.get_batch_samples(moved, len(batches), DEVICE)
        trainer.current_gradient_accumulation_steps = len(samples)
        for index, inputs in enumerate(samples):
            last = index == len(samples) - 1
            if last or index < MICRO_BATCHES - 1:
                # The Trainer tells accelerate in the same way which micro-batch is a step's last.
                trainer.accelerator.gradient_state._set_sync_gradients(last)
                loss = trainer.training_step(model, inputs, items)
                trainer._tr_loss += loss
        limit = trainer.args.max_grad_norm
        if limit <= 0:
            limit = math.inf  # nothing is clipped, and the norm is for the log only
        norm = None  # noqa: F841 - frees the norm of the step before
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), limit)  # noqa: F841
        trainer.optimizer.step()
        model.zero_grad()
        meter.enter_phase(None)
    del samples, inputs  # the Trainer frees them in this order


def evaluate(trainer: MeteredTrainer, meter: Meter, batches: Sequence[Batch]) -> None:
    """Run the Trainer's own loop of an evaluation.

    What it frees stays reserved, in segments that the steps after it have to live with.
    """
    if batches:
        with meter.phase(Phase.EVALUATION):
            loader = _Loader(batches, ahead=not cast("ShadowTracker", meter.tracker).cuda)
            trainer.evaluation_loop(cast("Any", loader), "Evaluation", prediction_loss_only=True)


@dataclass
class _Loader:
    """The loader of an evaluation. A batch stays alive until the next one exists, as with accelerate's.

    Args:
        ahead: whether it makes one batch more than was asked for, as accelerate's does where the host is the device.
    """

    dataset: Sequence[Batch]
    ahead: bool

    def __iter__(self) -> Iterator[Batch]:
        moved = map(_move, self.dataset)
        waiting: list[Batch] = []
        if self.ahead:
            waiting += islice(moved, 1)
        for batch in moved:
            waiting.append(batch)
            yield waiting.pop(0)
        yield from waiting


def _batches(trainer: MeteredTrainer, padding: bool) -> list[Batch]:
    """Return the micro-batches of one step on the host, as dataset and collator make them.

    Where examples have unequal lengths, each micro-batch has the longest: the peak of a run is that of such a batch.
    """
    size = trainer.args.per_device_train_batch_size
    count = trainer.args.gradient_accumulation_steps
    dataset: Any = trainer.train_dataset
    others = cycle(list(islice(cast("Iterable[Any]", dataset), size * count)))
    longest = dataset[int(row_lengths(dataset).argmax())] if isinstance(dataset, Dataset) else next(others, None)
    collator = cast("Callable[..., Batch]", trainer.data_collator)
    if padding:
        collator = partial(add_mask, collator)
    return [collator([longest, *islice(others, size - 1)]) for _ in range(count)]


def _move(batch: Batch) -> Batch:
    """Copy a batch, as moving it to another device would. All of the shadow's tensors are on one."""
    return {name: tensor.clone() for name, tensor in batch.items()}


def _fake_batch(batch: Batch, mode: FakeTensorMode) -> Batch:
    """Return a batch of fake tensors with the shapes and types of this one."""
    return {name: mode.from_tensor(tensor.to(DEVICE)) for name, tensor in batch.items()}
