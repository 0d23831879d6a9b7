"""The folder of all records: which runs are alive, which were killed, which one can be resumed.

Each run has one JSON file, which its process writes alone. A lock is needed only to change the record of another
process. A run is alive as long as the process that began it is.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterable
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
# The field `starttime` in /proc/PID/stat (proc(5)), counted from 0 behind the name of the program.
FIELD_OF_THE_START = 19
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
    _remove_if_empty(checkpoint_root)
    try:
        record.save(folder)
    except OSError as error:
        warning = f"the record was printed instead of written: {disk_refusal(folder or runs_folder(), error)}"
        record = replace(record, warnings=[*record.warnings, warning])
        print(f"warning: {warning} Keep these lines as {record.id}.json:\n{record.to_json()}", file=sys.stderr)
    _running_here.discard(record.id)
    return record


def _remove_if_empty(checkpoint_root: Path) -> None:
    """Remove the folders that the Trainer makes for checkpoints in any case, if there is nothing in them."""
    for folder in (checkpoint_root, checkpoint_root.parent):
        with suppress(OSError):  # `rmdir` removes only empty ones
            folder.rmdir()


def mark_killed(folder: Path | None = None) -> list[Record]:
    """Give the status `killed` to runs that say `running` although their process is gone, and return their records.

    Runs of other living processes, and of other machines that share the folder, are left alone.
    """
    folder = folder or runs_folder()
    marked: list[Record] = []
    # These are listed before the runs that go on are: a run makes its folder after its record.
    leftovers = [root for root in _checkpoint_folders(folder) if _is_left_by_a_kill(root)]
    running = _running(folder)
    if all(map(_alive, running)) and not _without_those_of(running, leftovers, folder):
        return marked
    # Records of a folder that cannot be written to are still shown.
    with suppress(OSError), FileLock(folder / LOCK, mode=0o666):
        # They are read again under the lock: another process may have marked one meanwhile, and gone on with it.
        running = _running(folder)
        for record in filterfalse(_alive, running):
            killed = replace(record, status=Status.KILLED, error="the process ended without a word")
            marked.append(killed)
            with suppress(PermissionError):  # the record is another user's
                killed.save(folder)
        # A kill's leftovers are removed whoever marked its run: another user may have.
        for root in _without_those_of(filter(_alive, running), leftovers, folder):
            shutil.rmtree(root / checkpoints.ASIDE, ignore_errors=True)
            _remove_if_empty(root)
    return marked


def _checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders for the checkpoints of the records that have a folder of their own."""
    roots = []
    with suppress(OSError):  # nobody may read it
        for entry in os.scandir(folder):
            if entry.is_dir() and Path(f"{entry.path}.json").is_file():
                roots.append(Path(entry.path, checkpoints.FOLDER))
    return roots


def _is_left_by_a_kill(root: Path) -> bool:
    """Whether a folder for checkpoints has a part of one, or nothing at all; before the first it is not there yet, but
    the record's own folder is."""
    with suppress(OSError):  # another process may remove it, or nobody may read it
        names = os.listdir(root if root.is_dir() else root.parent)
        return checkpoints.ASIDE in names or not names
    return False


def _without_those_of(running: Iterable[Record], roots: list[Path], folder: Path) -> list[Path]:
    """Return the folders of checkpoints that belong to none of these runs."""
    going_on = {checkpoint_folder(record, folder) for record in running}
    return [root for root in roots if root not in going_on]


def _running(folder: Path) -> list[Record]:
    records = read_all(folder, containing=rf'"status"\s*:\s*"{Status.RUNNING}"')
    return [record for record in records if record.status is Status.RUNNING]


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
    """Return what identifies a process for good: a later one with the same number has another start."""
    return {"host": platform.node(), "pid": pid, "start": _start_of(psutil.Process(pid))}


def _start_of(process: psutil.Process) -> str:
    """Return when a process started, in a form that no clock moves when it is set: on Linux the boot of the system and
    the kernel's ticks since then, elsewhere the time that the system has noted."""
    if sys.platform != "linux":
        return f"{process.create_time():.6f}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    after_the_name = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    ticks = int(after_the_name.split()[FIELD_OF_THE_START])
    return f"{boot} {ticks - _offset_ticks()}"


def _offset_ticks() -> int:
    """Return the ticks by which the kernel moves what this process reads of starts: those of its time namespace."""
    with suppress(OSError):  # an older kernel has no such namespaces
        for line in Path("/proc/self/timens_offsets").read_text(encoding="utf-8").splitlines():
            clock, seconds, nanoseconds = line.split()
            if clock == "boottime":
                return round((int(seconds) + int(nanoseconds) / 1e9) * os.sysconf("SC_CLK_TCK"))
    return 0


def _is_same_start(start: str, process: psutil.Process) -> bool:
    """Whether a process has the start that a record names."""
    boot, _, ticks = start.rpartition(" ")
    if not boot:  # a time
        return bool(abs(process.create_time() - float(start)) < 1.0)  # seconds
    boot_now, _, ticks_now = _start_of(process).rpartition(" ")
    return boot == boot_now and abs(int(ticks) - int(ticks_now)) <= 1  # the offset may be a fraction of a tick


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
        return _is_same_start(owner["start"], process)
    except (psutil.NoSuchProcess, ValueError, OverflowError):  # no process can have such a number
        return False
    except (psutil.Error, OSError):
        return True
