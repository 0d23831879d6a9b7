"""The folder of records as a whole: which runs are alive, which were killed, which one can be resumed.

One JSON file per run, so only who changes the record of another process needs a lock. A run is alive as long as the
process that began it is.
"""

import os
import platform
import shutil
import sys
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from workbench.errors import ConfigurationError, OutOfMemoryError
from workbench.measure.categories import format_bytes
from workbench.paths import runs_folder, unwritten
from workbench.records import checkpoints
from workbench.records.record import WORLD, Record, Status, read_all
from workbench.techniques import REGISTRY, Numerics

UNFINISHED = (Status.KILLED, Status.INTERRUPTED, Status.FAILED, Status.OOM)
LOCK = ".lock"  # held while the record of another process is changed; a process that ends lets go of it
_running_here: set[str] = set()  # ids of the runs that this process is executing


def begin(record: Record, folder: Path | None, resume: bool = False) -> Record:
    """Write the record as `running`, owned by this process.

    Args:
        resume: go on with the unfinished run that this one would repeat, if there is one.

    Raises:
        ConfigurationError: the folder cannot be written to, or as `resumable` does; nothing has been loaded yet.
    """
    folder = folder or runs_folder()
    try:
        with FileLock(folder / LOCK) if resume else nullcontext():  # two may want the same one
            record = _resumed(record, folder) if resume else record
            record = replace(record, status=Status.RUNNING, error="", owner=_process(os.getpid()))
            _running_here.add(record.id)  # first: another thread may look for dead runs at any time
            record.save(folder)
    except OSError as error:
        raise ConfigurationError(f"folder: {unwritten(folder, error)}") from None
    return record


def end(record: Record, folder: Path | None) -> Record:
    """Write how the run ended. If the disk refuses, the record is printed on standard error, so nothing is lost.

    The checkpoints of a run that ended well are of no use any more.
    """
    checkpointed = checkpoint_folder(record, folder)
    if record.status is Status.OK:
        shutil.rmtree(checkpointed, ignore_errors=True)
    for empty in (checkpointed, checkpointed.parent):
        with suppress(OSError):
            empty.rmdir()  # the Trainer makes it in any case; only if nothing is in it
    try:
        record.save(folder)
    except OSError as error:
        told = f"the record was printed instead of written: {unwritten(folder or runs_folder(), error)}"
        record = replace(record, warnings=[*record.warnings, told])
        print(f"warning: {told} Keep these lines as {record.id}.json:\n{record.to_json()}", file=sys.stderr)
    _running_here.discard(record.id)
    return record


def out_of_memory_error(record: Record) -> OutOfMemoryError:
    """What an `oom` record says, with the cure in its words, and beside them where it happened."""
    exact = ", ".join(name for name, t in REGISTRY.items() if t.numerics is Numerics.EXACT and t.attacks)
    cure = f"Use a smaller effective_batch_size or sequence_length, or a technique with the same loss: {exact}."
    room = f"memory cap of {format_bytes(record.memory_cap_bytes)}" if record.memory_cap_bytes else "memory"
    return OutOfMemoryError(
        f"{record.label} did not fit into the {room} of {record.device}: {record.error} {cure} "
        "For a diagnosis: python -m workbench doctor",
        record_id=record.id, phase=record.peak_phase, operation=record.failed_operation, by_category=record.by_category,
        requested_bytes=record.requested_bytes, allocated_bytes=record.allocated_at_failure_bytes,
        reserved_bytes=record.reserved_at_failure_bytes,
    )  # fmt: skip


def mark_killed(folder: Path | None = None) -> list[Record]:
    """Give the status `killed` to runs that say `running` although their process is gone, and return their records.

    Runs of other living processes, and of other machines that share the folder, are left alone.
    """
    folder, marked = folder or runs_folder(), list[Record]()
    if not _dead(folder):
        return marked
    with suppress(OSError), FileLock(folder / LOCK):  # a folder that cannot be written to is still shown
        for record in _dead(folder):  # anew: another process may have marked one meanwhile, and gone on with it
            marked.append(replace(record, status=Status.KILLED, error="the process ended without a word"))
            marked[-1].save(folder)
    return marked


def _dead(folder: Path) -> list[Record]:
    return [record for record in read_all(folder) if record.status is Status.RUNNING and not _alive(record)]


def checkpoint_folder(record: Record, folder: Path | None) -> Path:
    return (folder or runs_folder()) / record.id / checkpoints.FOLDER


def resumable(record: Record, folder: Path | None) -> Record | None:
    """The newest unfinished run with a whole checkpoint that a new one would repeat; None if there is none to resume.

    Raises:
        ConfigurationError: there is one, but of another recipe, text or device; the message names every difference. Or
            the same run is going on in another process, which is named.
    """
    another = ""
    for other in reversed(read_all(folder)):
        different = _differences(other, record)
        if other.status is Status.RUNNING and not different and _alive(other):
            raise ConfigurationError(
                f"resume: this run goes on as {other.id}, in process {other.owner.get('pid')} on "
                f"{other.owner.get('host')}. Wait for it, or end it. If nobody runs it any more, write killed for "
                f"running in {other.path(folder)}."
            )
        if other.status in UNFINISHED and checkpoints.newest_checkpoint(checkpoint_folder(other, folder)):
            if not different:
                return other
            another = another or f"the unfinished run {other.id} is another one: {'; '.join(different)}"
    if another:
        raise ConfigurationError(f"resume: {another}. Give the same recipe and text, or run without resume.")
    return None


def _resumed(record: Record, folder: Path) -> Record:
    """The run to go on with, under the conditions asked for now; or the new one, which says that there is none."""
    if (found := resumable(record, folder)) is not None:
        return replace(found, **{name: getattr(record, name) for name in ("memory_cap_bytes", "device_bytes", *WORLD)})
    told = "nothing to resume: no unfinished run of this recipe has a whole checkpoint, so this one starts anew"
    print(f"warning: {told}", file=sys.stderr)
    return replace(record, warnings=[*record.warnings, told])


def _differences(one: Record, other: Record) -> list[str]:
    pairs = [(name, one.recipe.get(name), other.recipe.get(name)) for name in one.recipe | other.recipe]
    # another number of ranks may go on: its losses are equal but for rounding
    kept = WORLD if one.world_size == other.world_size else ("device_kind", "device_name")
    pairs += [(name, getattr(one, name), getattr(other, name)) for name in (*kept, "data_sha256")]
    return [f"{name} was {was!r} and is now {now!r}" for name, was, now in pairs if was != now]


def _process(pid: int) -> dict[str, Any]:
    """A later process of the same number began at another time."""
    return {"host": platform.node(), "pid": pid, "began": psutil.Process(pid).create_time()}


def _alive(record: Record) -> bool:
    """Where nobody can tell, yes: on another machine, of another user, or of an owner that is no process."""
    owner = record.owner if isinstance(record.owner, dict) else {}
    pid, began = owner.get("pid"), owner.get("began")
    if owner.get("host") != platform.node() or type(pid) is not int:
        return bool(record.owner)
    if pid == os.getpid():
        return record.id in _running_here
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and not abs(process.create_time() - began) >= 1.0
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # no process can have such a number
        return False
    except (psutil.Error, TypeError):
        return True
