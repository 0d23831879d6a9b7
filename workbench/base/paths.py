"""The folders of the workbench (the embedded models, texts and notebooks, the learner's own runs), files that are read
and written whole, and the versions of what is installed.

In a checkout models, texts and notebooks lie beside the package; a wheel has them in `workbench/_data`, where nothing
is ever written.
"""

import errno
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from getpass import getuser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from platformdirs import user_data_path
from psutil import disk_partitions, pid_exists

from workbench.base.errors import DISTRIBUTION, ConfigurationError, UnavailableError, explain_errors

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
INSTALLED = (PACKAGE / "_data").is_dir()
DATA = PACKAGE / "_data" if INSTALLED else ROOT / "data"
MODELS = DATA / "models"
CORPORA = DATA / "corpora"
NOTEBOOKS = DATA / "notebooks" if INSTALLED else ROOT / "notebooks"
BUILD = Path.cwd() / "build" if INSTALLED else ROOT / "build"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk, a quota, and a file system's largest file
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # a name that may become part of a path

# A child process executes this line first, so that it imports this very package, whatever else on its path is called
# workbench.
PIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import workbench; del sys.path[0]"


# ---- folders and names ----


def runs_folder() -> Path:
    """Return the folder that the environment variable `WORKBENCH_RUNS` names, else `data/runs`; for a wheel, a folder
    of the user."""
    default = DATA / "runs"
    if INSTALLED:
        default = user_data_path(DISTRIBUTION, appauthor=False) / "runs"
    return Path(os.environ.get("WORKBENCH_RUNS") or default).expanduser().resolve()


def folder_of_runs(name: str) -> Path:
    """Return a folder beside the records, or one of this user where it belongs to another user, who shares the
    records."""
    folder = runs_folder() / name
    if folder.exists() and not os.access(folder, os.W_OK):
        return folder.with_name(f"{name}-{getuser()}")
    return folder


def is_valid_name(name: object) -> bool:
    """Whether it is 1 to 64 letters, digits, dots, dashes and underscores; `.` and `..`, which are folders, are not."""
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and bool(name.strip("."))


def path_inside(root: Path, name: str) -> Path:
    """Return the path `root / name`.

    Raises:
        ConfigurationError: the name is not valid (`is_valid_name`), or the path, links resolved, leaves the root.
    """
    if not is_valid_name(name):
        raise ConfigurationError(f"name: {name!r:.90} cannot be a file's. Use 1 to 64 letters, digits, dots, - and _.")
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigurationError(f"name: {name!r} is a link that leads out of {root}. Remove it.")
    return path


def no_disk() -> str:
    """Say why a temporary file would save no memory, with the cure: its folder is held in memory. Empty if the folder
    is on a disk."""
    file_systems = {Path(part.mountpoint): part.fstype for part in disk_partitions(all=True)}
    folder = Path(tempfile.gettempdir()).resolve()
    file_system = ""
    for path in reversed((folder, *folder.parents)):  # the nearest mount is read last, and decides
        file_system = file_systems.get(path, file_system)
    if file_system not in ("tmpfs", "ramfs"):
        return ""
    return (
        f"{tempfile.gettempdir()} is itself held in memory ({file_system}), so nothing would be "
        "saved. Let the environment variable TMPDIR name a folder on a disk."
    )


# ---- reading ----


def read_beside(module: str, name: str) -> Any:
    """Return the contents of a TOML or JSON file that lies beside a module, which passes its `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return tomllib.loads(text) if name.endswith(".toml") else json.loads(text)


def read_toml(path: Path, owner: str, cure: str) -> dict[str, Any]:
    """Return the contents of a user's TOML file. Raises ConfigurationError if it cannot be read, with the line at
    fault."""
    with explain_errors(f"{owner}: {path} cannot be read", cure):
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8-sig"))


# ---- writing: a file exists whole, or not at all ----


def write_whole(path: Path, text: str) -> Path:
    """Write a text file: complete or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part")
    try:
        part.write_text(text, encoding="utf-8")
        return put_in_place(part, path.name)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def part_file(folder: Path, what: str) -> Iterator[Path]:
    """Yield a path to write `what` to, until `put_in_place` gives the file its name; otherwise the file is removed.

    Parts that other processes left, because they were killed, are removed as well.

    Raises:
        UnavailableError: the disk is full, or the folder cannot be written to.
    """
    part = folder / f"{os.urandom(4).hex()}@{platform.node()}.{os.getpid()}-part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other_part in folder.glob("*-part*"):
            if _left_by_dead_process(other_part):
                with suppress(PermissionError):  # it may be another user's
                    other_part.unlink(missing_ok=True)
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        reason = "the disk is full" if error.errno in FULL else error.strerror or error
        raise UnavailableError(
            f"{what} cannot be written to {folder}: {reason}. Free some space, or name another "
            "place in the environment variable WORKBENCH_RUNS."
        ) from None


def _left_by_dead_process(part: Path) -> bool:
    """Whether nobody writes to this part any more. False if another machine, which shares the folder, wrote it."""
    writer, _, pid = part.name.partition("-part")[0].rpartition(".")
    _, at, host = writer.rpartition("@")
    is_of_this_machine = not at or host == platform.node()  # older versions wrote no host
    return is_of_this_machine and pid.isdigit() and not pid_exists(int(pid))


def put_in_place(part: Path, name: str) -> Path:
    """Give a file its name in the same folder. The file is whole on the disk before it has this name."""
    sync(part)
    return part.replace(part.with_name(name))


def sync(path: Path) -> None:
    """Have the system write a file or a folder out to the disk."""
    # Windows cannot open a folder for this, and does not need to.
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder: Path) -> None:
    """Write a file into the folder, or into the nearest parent that exists, and remove it again.

    Raises:
        ConfigurationError: that failed, with the reason.
    """
    try:
        existing = folder
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(2**16))  # 64 KiB are more than a record has
    except OSError as error:
        raise ConfigurationError(f"folder: {disk_refusal(folder, error)}") from None


def disk_refusal(folder: Path, error: Exception) -> str:
    """Tell a user that nothing can be written: the folder, why, and what to do."""
    message = str(error).splitlines()[0]
    # torch says in these words that a write was cut short.
    if "unexpected pos" in message or "PytorchStreamWriter" in message:
        message = "the disk took only a part of a file"
    reason = getattr(error, "strerror", None) or message
    return f"nothing can be written into {folder} ({reason}). Free some space, or set WORKBENCH_RUNS to another folder."


# ---- versions ----


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python, the workbench and the libraries that decide a result, by name."""
    versions_by_name = {"python": sys.version.split()[0]}
    for name in ("workbench", "torch", "transformers", "accelerate", "peft", "datasets"):
        try:
            versions_by_name[name] = version(DISTRIBUTION if name == "workbench" else name)
        except PackageNotFoundError:
            versions_by_name[name] = "missing"
    return versions_by_name


@cache
def git_commit() -> str:
    """Return the commit of the workbench's checkout, with `-dirty` for local changes; empty outside of git and for a
    wheel."""
    if INSTALLED:  # git would describe the repository that the environment happens to lie in
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
