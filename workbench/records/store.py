"""The folder of records as a whole: which runs are alive, which were killed, which one can be resumed.

One JSON file per run, so there is nothing to lock. A run is alive as long as the process that began it is.
"""

import os
import platform
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from workbench.errors import ConfigurationError, OutOfMemoryError
from workbench.measure.categories import format_bytes
from workbench.paths import runs_folder
from workbench.records import checkpoints
from workbench.records.record import WORLD, Record, Status, read_all
from workbench.techniques import REGISTRY, Numerics

UNFINISHED = (Status.KILLED, Status.INTERRUPTED, Status.FAILED, Status.OOM)
_running_here: set[str] = set()  # ids of the runs that this process is executing


def begin(record: Record, folder: Path | None) -> Record:
    """Write the record as `running`, owned by this process.

    Raises:
        ConfigurationError: the folder cannot be written to; nothing has been loaded yet.
    """
    record = replace(record, status=Status.RUNNING, error="", owner=_process(os.getpid()))
    try:
        record.save(folder)
    except OSError as error:
        raise ConfigurationError(
            f"records: nothing can be written into {folder or runs_folder()} ({error.strerror}). Free some space, or "
            "name another folder in the environment variable WORKBENCH_RUNS."
        ) from None
    _running_here.add(record.id)
    return record


def end(record: Record, folder: Path | None) -> Record:
    """Write how the run ended. If the disk refuses, the record is printed on standard error, so nothing is lost.

    The checkpoints of a run that ended well are of no use any more.
    """
    _running_here.discard(record.id)
    checkpointed = checkpoint_folder(record, folder)
    if record.status is Status.OK:
        shutil.rmtree(checkpointed, ignore_errors=True)
    for empty in (checkpointed, checkpointed.parent):
        with suppress(OSError):
            empty.rmdir()  # the Trainer makes it in any case; only if nothing is in it
    try:
        record.save(folder)
    except OSError as error:
        warning = f"the record could not be written ({error.strerror}) and was printed instead"
        record = replace(record, warnings=[*record.warnings, warning])
        print(f"warning: {warning}. Keep these lines as {record.id}.json:\n{record.to_json()}", file=sys.stderr)
    return record


def out_of_memory_error(record: Record) -> OutOfMemoryError:
    """What an `oom` record says, with the cure in its words, and beside them where it happened."""
    exact = ", ".join(name for name, t in REGISTRY.items() if t.numerics is Numerics.EXACT and t.attacks)
    cure = f"Use a smaller effective_batch_size or sequence_length, or a technique with the same loss: {exact}."
    room = f"memory cap of {format_bytes(record.memory_cap_bytes)}" if record.memory_cap_bytes else "memory"
    return OutOfMemoryError(
        f"{record.label} did not fit into the {room} of {record.device}: {record.error} {cure} "
        "For a diagnosis: python -m workbench doctor",
        record_id=record.id,
        phase=record.peak_phase,
        operation=record.failed_operation,
        by_category=record.by_category,
        requested_bytes=record.requested_bytes,
        allocated_bytes=record.allocated_at_failure_bytes,
        reserved_bytes=record.reserved_at_failure_bytes,
    )


def mark_killed(folder: Path | None = None) -> list[Record]:
    """Give the status `killed` to runs that say `running` although their process is gone, and return their records.

    Runs of other living processes, and of other machines that share the folder, are left alone.
    """
    dead = [record for record in read_all(folder) if record.status is Status.RUNNING and not _alive(record)]
    marked = [replace(record, status=Status.KILLED, error="the process ended without a word") for record in dead]
    for record in marked:
        record.save(folder)
    return marked


def checkpoint_folder(record: Record, folder: Path | None) -> Path:
    return (folder or runs_folder()) / record.id / "checkpoints"


def model_folder(record: Record, folder: Path | None) -> Path:
    return (folder or runs_folder()) / record.id / "model"


def resumable(record: Record, folder: Path | None) -> Record | None:
    """The newest unfinished run with a whole checkpoint that a new one would repeat; None if there is none to resume.

    Raises:
        ConfigurationError: there is one, but of another recipe, text or device; the message names every difference.
    """
    found = [other for other in read_all(folder) if other.status in UNFINISHED]
    found = [other for other in found if checkpoints.newest_checkpoint(checkpoint_folder(other, folder))]
    differences = [(other, _differences(other, record)) for other in reversed(found)]
    same = next((other for other, different in differences if not different), None)
    if same is None and differences:
        other, different = differences[0]
        raise ConfigurationError(
            f"resume: the unfinished run {other.id} is another one: {'; '.join(different)}. "
            "Give the same recipe and text, or run without resume."
        )
    return same


def _differences(one: Record, other: Record) -> list[str]:
    pairs = [(name, one.recipe.get(name), value) for name, value in other.recipe.items()]
    pairs += [(name, getattr(one, name), getattr(other, name)) for name in (*WORLD, "data_sha256")]
    return [f"{name} was {was!r} and is now {now!r}" for name, was, now in pairs if was != now]


def _process(pid: int) -> dict[str, Any]:
    """A later process of the same number began at another time."""
    return {"host": platform.node(), "pid": pid, "began": psutil.Process(pid).create_time()}


def _alive(record: Record) -> bool:
    owner = record.owner
    if not owner:
        return False
    if owner["host"] != platform.node():
        return True  # nobody here can tell
    if owner["pid"] == os.getpid():
        return record.id in _running_here
    try:
        return bool(abs(_process(owner["pid"])["began"] - owner["began"]) < 1.0)
    except psutil.Error:
        return False
