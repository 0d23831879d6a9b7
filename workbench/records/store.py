"""The folder of records as a whole: which runs are alive, which were killed, which one can be resumed.

One JSON file per run, so there is nothing to lock. A run is alive as long as the process that began it is.
"""

import os
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from workbench.errors import ConfigurationError
from workbench.paths import runs_folder
from workbench.recipe import Recipe
from workbench.records import checkpoints
from workbench.records.record import Record, Status, read_all

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
    """Write how the run ended. If the disk refuses, the record is printed on standard error, so nothing is lost."""
    _running_here.discard(record.id)
    try:
        record.save(folder)
    except OSError as error:
        warning = f"the record could not be written ({error.strerror}) and was printed instead"
        record = replace(record, warnings=[*record.warnings, warning])
        print(f"warning: {warning}. Keep these lines as {record.id}.json:\n{record.to_json()}", file=sys.stderr)
    return record


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


def resumable(recipe: Recipe, folder: Path | None, **facts: Any) -> Record | None:
    """The newest unfinished run of this recipe that has a whole checkpoint; None if there is nothing to resume.

    Args:
        facts: fields of the record that have to be equal too: the world's and `data_sha256`.

    Raises:
        ConfigurationError: there is one, but of another recipe or text; the message names every difference.
    """
    found = [record for record in read_all(folder) if record.status in UNFINISHED]
    found = [record for record in found if checkpoints.newest_checkpoint(checkpoint_folder(record, folder))]
    differences = [(record, _differences(record, recipe, facts)) for record in reversed(found)]
    same = next((record for record, different in differences if not different), None)
    if same is None and differences:
        record, different = differences[0]
        raise ConfigurationError(
            f"resume: the unfinished run {record.id} is another one: {'; '.join(different)}. "
            "Give the same recipe and text, or run without resume."
        )
    return same


def _differences(record: Record, recipe: Recipe, facts: dict[str, Any]) -> list[str]:
    pairs = [(name, record.recipe.get(name), value) for name, value in recipe.to_dict().items()]
    pairs += [(name, getattr(record, name), value) for name, value in facts.items()]
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
