"""The folder of all records: which runs are alive, which were killed, which one can be resumed.

Each run has one JSON file, which its process writes alone. A lock is needed only to change the record of another
process. A run is alive as long as the process that began it is.
"""

import os
import platform
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from workbench.base.errors import ConfigurationError
from workbench.base.paths import disk_refusal, runs_folder
from workbench.journal import checkpoints
from workbench.journal.record import WORLD, Record, Status, read_all

UNFINISHED = (Status.KILLED, Status.INTERRUPTED, Status.FAILED, Status.OOM)
# The file of the lock, which all users share. A process that ends gives it back.
LOCK = ".lock"
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
        # A new run needs no lock. A resumed one does: two processes may want the same unfinished run.
        with ExitStack() as stack:
            if resume:
                stack.enter_context(FileLock(folder / LOCK, mode=0o666))
                record = _resume_or_begin(record, folder)
            record = replace(record, status=Status.RUNNING, error="", owner=_process(os.getpid()))
            # Noted before the record is saved: another thread may look for dead runs at any time.
            _running_here.add(record.id)
            record.save(folder)
    except OSError as error:
        raise ConfigurationError(f"folder: {disk_refusal(folder, error)}") from None
    return record


def end(record: Record, folder: Path | None) -> Record:
    """Write how the run ended. If the disk refuses, the record is printed on standard error, so nothing is lost.

    The checkpoints of a run that ended well are of no use any more.
    """
    checkpoint_root = checkpoint_folder(record, folder)
    if record.status is Status.OK:
        shutil.rmtree(checkpoint_root, ignore_errors=True)
    # The Trainer makes these folders in any case; `rmdir` removes only empty ones.
    for empty in (checkpoint_root, checkpoint_root.parent):
        with suppress(OSError):
            empty.rmdir()
    try:
        record.save(folder)
    except OSError as error:
        warning = f"the record was printed instead of written: {disk_refusal(folder or runs_folder(), error)}"
        record = replace(record, warnings=[*record.warnings, warning])
        print(f"warning: {warning} Keep these lines as {record.id}.json:\n{record.to_json()}", file=sys.stderr)
    _running_here.discard(record.id)
    return record


def mark_killed(folder: Path | None = None) -> list[Record]:
    """Give the status `killed` to runs that say `running` although their process is gone, and return their records.

    Runs of other living processes, and of other machines that share the folder, are left alone.
    """
    folder = folder or runs_folder()
    marked: list[Record] = []
    parts = [*folder.glob(f"*/{checkpoints.FOLDER}/{checkpoints.ASIDE}")]
    if not (parts or _dead(folder)):
        return marked
    # Records of a folder that cannot be written to are still shown.
    with suppress(OSError), FileLock(folder / LOCK, mode=0o666):
        # They are read again under the lock: another process may have marked one meanwhile, and gone on with it.
        for record in _dead(folder):
            killed = replace(record, status=Status.KILLED, error="the process ended without a word")
            marked.append(killed)
            with suppress(PermissionError):  # the record is another user's
                killed.save(folder)
        going_on = {checkpoint_folder(record, folder) for record in _running(folder)}
        # Parts of checkpoints are removed whoever marked their runs: another user may have.
        for part in parts:
            if part.parent not in going_on:
                shutil.rmtree(part, ignore_errors=True)
    return marked


def _running(folder: Path) -> list[Record]:
    records = read_all(folder, containing=rf'"status"\s*:\s*"{Status.RUNNING}"')
    return [record for record in records if record.status is Status.RUNNING]


def _dead(folder: Path) -> list[Record]:
    """Return the records that say `running` although the process that began the run is gone."""
    return list(filterfalse(_alive, _running(folder)))


def checkpoint_folder(record: Record, folder: Path | None) -> Path:
    return (folder or runs_folder()) / record.id / checkpoints.FOLDER


def resumable(record: Record, folder: Path | None) -> Record | None:
    """Return the newest unfinished run with a whole checkpoint that a new one would repeat; None if there is none.

    Raises:
        ConfigurationError: there is one, but of another recipe, text or device; the message names every difference. Or
            the same run is going on in another process, which is named.
    """
    refusal = ""
    statuses = "|".join([Status.RUNNING, *UNFINISHED])
    for other in reversed(read_all(folder, containing=rf'"status"\s*:\s*"({statuses})"')):
        differences = _differences(other, record)
        if other.status is Status.RUNNING and not differences and _alive(other):
            raise ConfigurationError(
                f"resume: this run goes on as {other.id}, in process {other.owner['pid']} on "
                f"{other.owner['host']}. Wait for it, or end it. If nobody runs it any more, write "
                f"killed for running in {other.path(folder)}."
            )
        its_folder = checkpoint_folder(other, folder)
        is_ours = os.access(its_folder, os.W_OK)  # another user's run could not go on there
        if other.status in UNFINISHED and is_ours and checkpoints.newest_checkpoint(its_folder):
            if not differences:
                return other
            # An older run may still be the same one. If none is, the message is about the newest.
            refusal = refusal or f"the unfinished run {other.id} is another one: {'; '.join(differences)}"
    if refusal:
        raise ConfigurationError(f"resume: {refusal}. Give the same recipe and text, or run without resume.")
    return None


def _resume_or_begin(record: Record, folder: Path) -> Record:
    """Return the record of the unfinished run to go on with, with the cap and the device of now; if there is none, the
    new record, with a warning."""
    unfinished = resumable(record, folder)
    if unfinished is not None:
        conditions = ("memory_cap_bytes", "device_bytes", *WORLD)
        return replace(unfinished, **{name: getattr(record, name) for name in conditions})
    warning = "nothing to resume: no unfinished run of this recipe has a whole checkpoint, so this one starts anew"
    print(f"warning: {warning}", file=sys.stderr)
    return replace(record, warnings=[*record.warnings, warning])


def _differences(before: Record, now: Record) -> list[str]:
    """Return how a run differs from an older one that it would go on with: a phrase for each field."""
    names = ["device_kind", "device_name", "data_sha256"]
    # A run may go on with another number of ranks: losses are equal but for rounding.
    if before.world_size == now.world_size:
        names += WORLD
    was = before.recipe_settings | {name: getattr(before, name) for name in names}
    wanted = now.recipe_settings | {name: getattr(now, name) for name in names}
    differences = []
    for name in was | wanted:
        if was.get(name) != wanted.get(name):
            differences.append(f"{name} was {was.get(name)!r} and is now {wanted.get(name)!r}")
    return differences


def _process(pid: int) -> dict[str, Any]:
    """Return what identifies a process for good: a later one with the same number begins at another time."""
    return {"host": platform.node(), "pid": pid, "began": psutil.Process(pid).create_time()}


def _alive(record: Record) -> bool:
    """Whether the process that began the run still exists.

    True if nobody can tell: it is on another machine, or another user's.
    """
    owner = record.owner
    if not owner or owner["host"] != platform.node():
        return bool(owner)
    if owner["pid"] == os.getpid():
        return record.id in _running_here
    try:
        process = psutil.Process(owner["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return bool(abs(process.create_time() - owner["began"]) < 1.0)  # seconds
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # no process can have such a number
        return False
    except psutil.Error:
        return True
