"""`run(recipe)`: fine-tune, measure, and leave a record, whatever happens.

First the gate (`workbench.training.job`), then the story (`workbench.training.execute`).
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError
from workbench.base.paths import check_writable, runs_folder
from workbench.gpus.emulator.call import also_on_emulated_devices
from workbench.journal import store
from workbench.journal.record import Record, Status, find_equal
from workbench.measure.allocators import allocator_for
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY, Numerics
from workbench.training.execute import execute
from workbench.training.job import Job, prepare
from workbench.training.ongoing import OngoingRun
from workbench.training.world import World, refuse_several_ranks

_ongoing: dict[int, str] = {}  # the run of a process, by the process's number: a fork of it has none


@also_on_emulated_devices
def run(
    recipe: Recipe,
    *,
    device: str | None = None,
    reuse: bool = False,
    save: str | None = None,
    sample_tokens: int = 0,
    checkpoint_every: int | None = None,
    resume: bool = False,
    memory_cap: str | int | None = None,
    longest_first: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    folder: Path | None = None,
) -> Record:
    """Fine-tune a recipe and measure memory, loss and speed.

    Args:
        device: `"cpu"`, `"cuda"` or `"mps"`; by default the fastest that is there. With `"emulated:t4"`, or another GPU
            of `workbench.gpus.catalogue`, this call is made in a process that has this emulated GPU: its record
            has memory, and neither loss nor speed.
        reuse: return the newest `ok` record of the same recipe, text, device and versions, if there is one.
        save: `"merged"` or `"adapter"`, to keep the fine-tuned model in the folder `record.model_path`.
        sample_tokens: continue the beginning of the held-out text by so many tokens, before and after.
        checkpoint_every: write a checkpoint every so many steps; they are removed when the run has ended well.
        resume: go on with the newest unfinished run of this recipe from its last whole checkpoint. On a CPU the
            losses are those of a run that was never interrupted. With nothing to resume it begins at the beginning.
        memory_cap: pretend that the device has no more than this, `"8GiB"` or a number of bytes. On CUDA the allocator
            keeps to it, at no cost. Elsewhere the tracker watches the bytes of tensors in every step, which takes
            time: such a run records no speed.
        longest_first: let every batch of the first three steps begin with the longest example, so that a run that
            cannot fit fails at once: compare such a run's memory, not its loss. Where all examples are equally long,
            or a stream, it changes nothing, and the record warns of that.
        callbacks: for the Trainer, beside those of the recipe; the record has their names among these, and such a run
            is not taken for another (`reuse`). A KeyboardInterrupt raised in one ends the run, as Ctrl-C does.
        folder: where records go; by default `data/runs`.

    Returns:
        The record, status `ok` or `diverged` (the loss stopped being a finite number; the record says at which step).

    Raises:
        ConfigurationError: something in the recipe cannot be used, the run to resume is of another recipe or text, or
            torchrun started this process; nothing was loaded and nothing recorded.
        UnavailableError: this machine cannot run it; recorded as `unavailable`. Or a program that it reports to is not
            installed; nothing was recorded.
        OutOfMemoryError: recorded as `oom`; it says where, and `diagnose(record)` what to change.
            Other failures are recorded as `failed` or `interrupted` and raised.
    """
    options = {
        "save": save,
        "sample_tokens": sample_tokens,
        "checkpoint_every": checkpoint_every,
        "resume": resume,
        "memory_cap": memory_cap,
        "longest_first": longest_first,
        "callbacks": callbacks,
    }
    with only_run(recipe):
        job = prepare_alone(recipe, device, folder, may_write_nothing=reuse, **options)
        if reuse and save is None and not callbacks:
            equal_record = find_equal(job.record, sampled=bool(sample_tokens), folder=folder)
            if equal_record:
                return equal_record
        return execute_or_raise(OngoingRun(job))


def prepare_alone(
    recipe: Recipe,
    device: str | None,
    folder: Path | None,
    *,
    may_write_nothing: bool = False,
    **options: Any,
) -> Job:
    """Pass the gate with a recipe that this process runs alone, and return its job.

    Raises:
        ConfigurationError: a launcher started this process, or no record could be written; and as the gate.
        UnavailableError: the device is not there, or as the gate.
    """
    refuse_several_ranks()
    if not may_write_nothing:
        check_writable(folder or runs_folder())
    store.mark_killed(folder)
    return prepare(recipe, World.find(device), folder=folder, **options)


def execute_or_raise(ongoing: OngoingRun) -> Record:
    """Execute a run's job and return its record, if it is `ok` or `diverged`. Raises otherwise, as `run` does."""
    record = execute(ongoing)
    # Raised here, where no handler is active: a chained traceback would keep the run's tensors alive.
    if record.status is Status.UNAVAILABLE:
        raise UnavailableError(record.error)
    if record.status is Status.OOM:
        # It collects tensors that the run's reference cycles still hold.
        allocator_for(ongoing.job.device.torch).prepare()
        raise out_of_memory_error(record)
    if ongoing.error is not None:
        raise ongoing.error
    return record


def out_of_memory_error(record: Record) -> OutOfMemoryError:
    """Return the error for an `oom` record: a message with a cure, and the record's id."""
    same_loss = []
    for name, technique in REGISTRY.items():
        if technique.attacks and technique.numerics is Numerics.EXACT:
            same_loss.append(name)
    limit = "memory"
    if record.memory_cap_bytes:
        limit = f"memory cap of {format_bytes(record.memory_cap_bytes)}"
    return OutOfMemoryError(
        f"{record.label} did not fit into the {limit} of {record.device}: {record.error} Use a "
        "smaller effective_batch_size or sequence_length, or a technique with the same loss: "
        f"{', '.join(same_loss)}. For a diagnosis: python -m workbench doctor",
        record.id,
    )


@contextmanager
def only_run(recipe: Recipe) -> Iterator[None]:
    """Refuse a second run in this process: PyTorch's modes, Accelerate's state and the libraries' settings belong to
    the whole process, so that each of two runs would spoil the other.

    Raises:
        ConfigurationError: another run goes on in this process, in another thread or around this one.
    """
    # Told from an equal sentence by `is`: a callback may call `run` with the very recipe that is running.
    this_run = f"{recipe.label} on {recipe.model}, in the thread {threading.current_thread().name}"
    try:
        ongoing = _ongoing.setdefault(os.getpid(), this_run)
        if ongoing is not this_run:
            raise ConfigurationError(
                f"run: another run goes on in this process ({ongoing}), and two would spoil each "
                "other. Wait for it, stop it with Ctrl-C or the playground's Stop, or start this "
                "one in a process of its own."
            )
        yield
    finally:
        if _ongoing.get(os.getpid()) is this_run:
            del _ongoing[os.getpid()]
