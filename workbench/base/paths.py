"""Where the workbench keeps things (the embedded models, texts and notebooks, the learner's own runs), how files are
read and written whole, and which versions of what are installed.

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

from workbench.base.errors import DISTRIBUTION, ConfigurationError, UnavailableError, explained

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
INSTALLED = (PACKAGE / "_data").is_dir()
DATA = PACKAGE / "_data" if INSTALLED else ROOT / "data"
MODELS = DATA / "models"
CORPORA = DATA / "corpora"
NOTEBOOKS = DATA / "notebooks" if INSTALLED else ROOT / "notebooks"
BUILD = Path.cwd() / "build" if INSTALLED else ROOT / "build"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # that becomes part of a path

# what a child process runs first, to import this very package, whatever else is called workbench on its path
PIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import workbench; del sys.path[0]"


# ---- folders and names ----


def runs_folder() -> Path:
    """The folder that the environment variable `WORKBENCH_RUNS` names, else `data/runs`; the user's from a wheel."""
    default = user_data_path(DISTRIBUTION, appauthor=False) / "runs" if INSTALLED else DATA / "runs"
    return Path(os.environ.get("WORKBENCH_RUNS") or default).expanduser().resolve()


def folder_of_runs(name: str) -> Path:
    """A folder beside the records; where it is another user's, who shares them, one of this user's own."""
    folder = runs_folder() / name
    if folder.exists() and not os.access(folder, os.W_OK):
        return folder.with_name(f"{name}-{getuser()}")
    return folder


def valid_name(name: object) -> bool:
    """1 to 64 letters, digits, dots, dashes and underscores; not `.` or `..`, which are folders."""
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and bool(name.strip("."))


def inside(root: Path, name: str) -> Path:
    """`root / name`.

    Raises:
        ConfigurationError: the name is not valid (`valid_name`), or the path, links resolved, leaves the root.
    """
    if not valid_name(name):
        raise ConfigurationError(f"name: {name!r:.90} cannot be a file's. Use 1 to 64 letters, digits, dots, - and _.")
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigurationError(f"name: {name!r} is a link that leads out of {root}. Remove it.")
    return path


def no_disk() -> str:
    """Why a temporary file would save no memory, with the cure: its folder is held in memory. Empty if it is not."""
    file_systems = {Path(part.mountpoint): part.fstype for part in disk_partitions(all=True)}
    folder = Path(tempfile.gettempdir()).resolve()
    file_system = ""
    for path in reversed((folder, *folder.parents)):  # the nearest mount decides
        file_system = file_systems.get(path, file_system)
    if file_system not in ("tmpfs", "ramfs"):
        return ""
    return (
        f"{tempfile.gettempdir()} is itself held in memory ({file_system}), so nothing would be "
        "saved. Let the environment variable TMPDIR name a folder on a disk."
    )


# ---- reading ----


def beside(module: str, name: str) -> Any:
    """The contents of a TOML or JSON file that lies beside a module, which gives its `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return tomllib.loads(text) if name.endswith(".toml") else json.loads(text)


def read_toml(path: Path, owner: str, cure: str) -> dict[str, Any]:
    """The contents of a user's TOML file. Raises ConfigurationError if it cannot be read, with the line at fault."""
    with explained(f"{owner}: {path} cannot be read", cure):
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8-sig"))


# ---- writing: a file is there whole, or not at all ----


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
def aside(folder: Path, what: str, ending: str = "") -> Iterator[Path]:
    """A path to write `what` to, until `put_in_place` gives the file its name; if that does not happen, it is removed.

    Such parts of other processes, which were killed meanwhile, are removed as well.

    Raises:
        UnavailableError: the disk is full, or the folder cannot be written to.
    """
    part = folder / f"{os.urandom(4).hex()}@{platform.node()}.{os.getpid()}-part{ending}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for other_part in folder.glob("*-part*"):
            if _left_by_dead_process(other_part):
                with suppress(PermissionError):  # another user's
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
    here = not at or host == platform.node()  # older versions wrote no host
    return here and pid.isdigit() and not pid_exists(int(pid))


def put_in_place(part: Path, name: str) -> Path:
    """Give a file its name in the same folder. It is whole on the disk before it can be seen under this name."""
    sync(part)
    return part.replace(part.with_name(name))


def sync(path: Path) -> None:
    """Have the system write a file or a folder out to the disk."""
    # Windows cannot open folders for this, and does not need to
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
            file.write(bytes(2**16))  # a record has a few kilobytes
    except OSError as error:
        raise ConfigurationError(f"folder: {unwritten(folder, error)}") from None


def unwritten(folder: Path, error: Exception) -> str:
    """What a user is told when the disk refuses: the folder, why, and what to do."""
    message = str(error).splitlines()[0]
    # how torch says that a write was cut short
    if "unexpected pos" in message or "PytorchStreamWriter" in message:
        message = "the disk took only a part of a file"
    reason = getattr(error, "strerror", None) or message
    return f"nothing can be written into {folder} ({reason}). Free some space, or set WORKBENCH_RUNS to another folder."


# ---- versions ----


@cache
def versions() -> dict[str, str]:
    """Versions of Python, the workbench and the libraries that decide a result."""
    versions_by_name = {"python": sys.version.split()[0]}
    for name in ("workbench", "torch", "transformers", "accelerate", "peft", "datasets"):
        try:
            versions_by_name[name] = version(DISTRIBUTION if name == "workbench" else name)
        except PackageNotFoundError:
            versions_by_name[name] = "missing"
    return versions_by_name


@cache
def git_commit() -> str:
    """The commit of the workbench's checkout, `-dirty` with local changes, empty outside of git and from a wheel."""
    if INSTALLED:  # git would describe the repository that the environment happens to lie in
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
