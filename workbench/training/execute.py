"""One run, told from the top down: load, train, measure, evaluate, save. It always ends in a record."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from workbench.base.errors import WorkbenchError
from workbench.base.garbage import clear_frames, freeze_living_objects
from workbench.base.paths import FULL, disk_refusal
from workbench.journal.record import Record, Status
from workbench.measure.allocators import allocator_for, cap_memory
from workbench.models.load import quiet
from workbench.training.arguments import build_training_arguments, check_optimizer
from workbench.training.ongoing import OngoingRun
from workbench.training.trainer import build_trainer
from workbench.training.watch import Watch

# Phrases in the messages of errors that mean no memory, and are no torch.OutOfMemoryError.
OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS
    "CUDA error: out of memory",  # the driver
    "MPS backend out of memory",
    "can't allocate memory",  # the CPU on Linux
    "not enough memory: you tried to allocate",  # the CPU on Windows
)


def execute(run: OngoingRun) -> Record:
    """Execute a run's job and return the record: ok, diverged, out of memory, interrupted, failed or unavailable.

    How the run ends is never raised. The error that ended it is `run.error`, with its traceback, for a caller to raise.

    Raises:
        ConfigurationError: transformers refuses an argument, the record cannot be written, or the run not be resumed.
            Nothing was loaded, and nothing recorded.
    """
    job = run.job
    if job.missing:
        run.note(status=Status.UNAVAILABLE, error=job.missing)
        return run.end()
    # Built here and nowhere else, in the process that has the device.
    arguments = build_training_arguments(job.arguments, job.device.kind, run.folder)
    check_optimizer(job.recipe, job.material.config, arguments, job.callbacks)
    run.begin()
    # A resumed run goes on in the folder of the older one, which `begin` has found.
    arguments.output_dir = str(run.folder)
    arguments.run_name = job.arguments.get("run_name", run.folder.name)
    try:
        with ExitStack() as contexts:
            for technique in job.recipe.techniques:
                contexts.enter_context(technique.run_context())
            contexts.enter_context(cap_memory(job.device.torch, run.record.memory_cap_bytes))
            fine_tune(run, arguments)
    except BaseException as error:  # Ctrl-C, sys.exit and a generator that is closed end a run, too
        run.note_progress()
        run.note(**describe_failure(run, error))
        # IPython keeps the traceback of a failed cell, and its frames would keep the model alive.
        run.trainer = None
        run.meter = None
        clear_frames(error)
    return run.end()


def fine_tune(run: OngoingRun, arguments: TrainingArguments) -> None:
    """Load the model, sample a text, train, evaluate, sample again and save. Each fact is noted as soon as it is known,
    since any line may be the last."""
    job = run.job
    allocator = allocator_for(job.device.torch)
    allocator.prepare()
    before_bytes = allocator.in_use()  # a notebook may hold tensors already: they are no memory of this run

    # `gc.freeze()` hides objects from `gc.get_objects()`, which `in_use()` counts on a CPU: so it comes after that.
    # Without it, garbage collection takes half of a short run's time.
    with freeze_living_objects(), quiet():
        model = run.load()
        run.note(text_before=run.sample(model))
        with run.meter_kind(model, before_bytes=before_bytes, cap_bytes=run.record.memory_cap_bytes) as meter:
            run.meter = meter
            watch = Watch(run, meter)
            callbacks = [watch, *job.callbacks]
            trainer = build_trainer(job.recipe, model, job.data, arguments, meter, callbacks, run.trainer_kind)
            run.trainer = trainer
            if job.record.longest_first:
                trainer.put_longest_first()
            run.behaviour.on_trainer_built(trainer)
            set_seed(job.recipe.seed)  # dropout is the same, whatever was drawn until now
            trainer.train_from(run.choose_checkpoint())  # all steps, or those after the checkpoint
            held_out_loss = math.nan
            if watch.losses_are_finite:
                held_out_loss = trainer.evaluate()["eval_loss"]
            trainer.end_reports()
        run.note(skipped_steps=watch.skipped_steps, **watch.speed(), **run.model_facts(model, trainer))
        run.note(text_after=run.sample(model))
        run.save(model)

    run.note_progress()
    if math.isfinite(held_out_loss):
        run.note(held_out_loss=held_out_loss)
    reason = why_diverged(run.record, held_out_loss, model.config.vocab_size)
    run.note(status=Status.OK)
    if reason:
        run.note(status=Status.DIVERGED, error=reason)


def why_diverged(record: Record, held_out_loss: float, vocabulary: int) -> str:
    """Say what went wrong with the loss, and the cure; empty if nothing did.

    A model that guesses uniformly among V tokens has loss ln V. One with new weights begins there, within one percent.
    One that ends above it, and above where it began, has lost what it knew.
    """
    before = record.held_out_loss_before
    uniform = math.log(vocabulary)
    if before is None and not (record.losses or math.isfinite(held_out_loss)):
        return (
            "the loss of the model as it was loaded is not a finite number. Its weights have "
            "numbers that are not finite, or too large for the type that they are loaded in. Take "
            "another copy of it."
        )
    what = f"the loss was not a finite number after {len(record.losses)} good steps"
    if math.isfinite(held_out_loss):
        if before is None or held_out_loss <= 1.01 * max(before, uniform):
            return ""
        what = f"the held-out loss rose from {before:.3f} to {held_out_loss:,.3f}; blind guessing has {uniform:.3f}"
    return f"{what}. Lower the learning rate, which was {record.learning_rate:g}."


def describe_failure(run: OngoingRun, error: BaseException) -> dict[str, Any]:
    """Return fields of a record: which status the run has, and what ended it.

    `run.error` becomes what a caller should raise. It is None where memory ran out: the record says all of that.
    """
    run.error = error
    if not isinstance(error, Exception):
        return {"status": Status.INTERRUPTED, "error": "interrupted by the user"}
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in FULL:
        message = f"run: {disk_refusal(Path(str(error.filename or run.job.folder)), error)}"
        run.error = WorkbenchError(message)
    if isinstance(error, torch.OutOfMemoryError) or any(phrase in message for phrase in OUT_OF_MEMORY):
        run.error = None
        return {"status": Status.OOM, "error": message.splitlines()[0], **run.refusal_facts(message)}
    return {"status": Status.FAILED, "error": message}
