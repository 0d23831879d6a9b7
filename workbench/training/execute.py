"""One run, told from the top down: load, train, measure, evaluate, save. It always ends in a record."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments, set_seed

from workbench.base.errors import WorkbenchError
from workbench.base.garbage import clear_frames, freeze_living_objects
from workbench.base.paths import FULL, unwritten
from workbench.journal.record import Record, Status
from workbench.measure.allocators import allocator_for, capped
from workbench.models.load import quiet
from workbench.training.arguments import check_optimizer, training_arguments
from workbench.training.place import Place
from workbench.training.trainer import assemble
from workbench.training.watch import Watch

# what those say that raise no torch.OutOfMemoryError when there is no memory
OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",  # cuBLAS
    "CUDA error: out of memory",  # the driver
    "MPS backend out of memory",
    "can't allocate memory",  # the CPU on Linux
    "not enough memory: you tried to allocate",  # the CPU on Windows
)


def execute(here: Place) -> Record:
    """Execute a place's job, and return the record: ok, diverged, out of memory, interrupted, failed or unavailable.

    How the run ends is never raised. What ended it before its end is `here.error`, with its traceback: the front door
    raises that.

    Raises:
        ConfigurationError: transformers refuses an argument, the record cannot be written, or the run not be resumed.
            Nothing was loaded, and nothing recorded.
    """
    job = here.job
    if job.lacking:
        here.note(status=Status.UNAVAILABLE, error=job.lacking)
        return here.end()
    # Built here and nowhere else, in the process that has the device.
    arguments = training_arguments(job.arguments, job.device.kind, here.run_folder)
    check_optimizer(job.recipe, job.material.config, arguments, job.callbacks)
    here.begin()
    # That may have found an older run to go on with.
    arguments.output_dir = str(here.run_folder)
    arguments.run_name = job.arguments.get("run_name", here.run_folder.name)
    try:
        with ExitStack() as contexts:
            for technique in job.recipe.techniques:
                contexts.enter_context(technique.run_context())
            contexts.enter_context(capped(job.device.torch, here.record.memory_cap_bytes))
            fine_tune(here, arguments)
    except BaseException as error:  # Ctrl-C, sys.exit and a generator that is closed end a run, too
        here.look()
        here.note(**ending(here, error))
        # IPython keeps the traceback of a failed cell, and its frames would keep the model alive.
        here.trainer = None
        here.meter = None
        clear_frames(error)
    return here.end()


def fine_tune(here: Place, arguments: TrainingArguments) -> None:
    """The story of a run. What it learns it notes at once, since any line may be the last."""
    job = here.job
    allocator = allocator_for(job.device.torch)
    allocator.prepare()
    before_bytes = allocator.in_use()  # what a notebook already holds is not this run's

    # Frozen only now, since that reading does not see what is. Collections would take half of a short run's time.
    with freeze_living_objects(), quiet():
        model = here.load()
        here.note(text_before=here.sample(model))
        with here.meter_kind(model, before_bytes=before_bytes, cap_bytes=here.record.memory_cap_bytes) as meter:
            here.meter = meter
            watch = Watch(here, meter)
            callbacks = [watch, *job.callbacks]
            trainer = assemble(job.recipe, model, job.data, arguments, meter, callbacks, here.trainer_kind)
            here.trainer = trainer
            if job.record.longest_first:
                trainer.put_longest_first()
            here.values.assembled(trainer)
            set_seed(job.recipe.seed)  # dropout is the same, whatever was drawn until now
            trainer.resume(here.checkpoint())
            held_out_loss = math.nan
            if watch.losses_are_finite:
                held_out_loss = trainer.evaluate()["eval_loss"]
            trainer.end_reports()
        here.note(skipped_steps=watch.skipped_steps, **watch.speed(), **here.trained_facts(model, trainer))
        here.note(text_after=here.sample(model))
        here.save(model)

    here.look()
    if math.isfinite(held_out_loss):
        here.note(held_out_loss=held_out_loss)
    reason = why_diverged(here.record, held_out_loss, model.config.vocab_size)
    here.note(status=Status.OK)
    if reason:
        here.note(status=Status.DIVERGED, error=reason)


def why_diverged(record: Record, held_out_loss: float, vocabulary: int) -> str:
    """What went wrong with the loss, and the cure; empty if nothing did.

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


def ending(here: Place, error: BaseException) -> dict[str, Any]:
    """Fields of a record: what ended the run before its end. `here.error` is what callers should see of it, if they
    should: a want of memory the record tells."""
    here.error = error
    if not isinstance(error, Exception):
        return {"status": Status.INTERRUPTED, "error": "interrupted by the user"}
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, OSError) and error.errno in FULL:
        message = f"run: {unwritten(Path(str(error.filename or here.job.folder)), error)}"
        here.error = WorkbenchError(message)
    if isinstance(error, torch.OutOfMemoryError) or any(phrase in message for phrase in OUT_OF_MEMORY):
        here.error = None
        return {"status": Status.OOM, "error": message.splitlines()[0], **here.refusal(message)}
    return {"status": Status.FAILED, "error": message}
