"""Where the workbench keeps things: the embedded models, texts and notebooks, and the learner's own runs. And which
workbench this is, among which libraries.

In a checkout they lie beside the package; a wheel has them in `workbench/_data`, where nothing is ever written.
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
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from platformdirs import user_data_path
from psutil import disk_partitions, pid_exists

from workbench.errors import DISTRIBUTION, ConfigurationError, UnavailableError, explained

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
INSTALLED = (PACKAGE / "_data").is_dir()
DATA = PACKAGE / "_data" if INSTALLED else ROOT / "data"
MODELS = DATA / "models"
CORPORA = DATA / "corpora"
NOTEBOOKS = DATA / "notebooks" if INSTALLED else ROOT / "notebooks"
BUILD = Path.cwd() / "build" if INSTALLED else ROOT / "build"
IN_MEMORY = ("tmpfs", "ramfs")  # file systems
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets")  # that decide a result
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # that becomes part of a path

# for a child: it gets this very package, whatever else is called workbench on its path or where it stands
PIN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import workbench; del sys.path[0]"


def beside(module: str, name: str) -> Any:
    """What a TOML or JSON file holds that lies beside a module, which gives its `__file__`."""
    text = Path(module).with_name(name).read_text(encoding="utf-8")
    return tomllib.loads(text) if name.endswith(".toml") else json.loads(text)


def read_toml(path: Path, owner: str, cure: str) -> dict[str, Any]:
    """What a user's TOML file holds. Raises ConfigurationError: it cannot be read, or is no TOML in the line named."""
    with explained(f"{owner}: {path} cannot be read", cure):
        return tomllib.loads(path.expanduser().read_text(encoding="utf-8-sig"))


def runs_folder() -> Path:
    """The folder that the environment variable `WORKBENCH_RUNS` names, else `data/runs`; the user's from a wheel."""
    own = user_data_path(DISTRIBUTION, appauthor=False) / "runs" if INSTALLED else DATA / "runs"
    return Path(os.environ.get("WORKBENCH_RUNS") or own).expanduser().resolve()


def check_writable(folder: Path) -> None:
    """Whether files can be written there. A folder that is not there yet is not made.

    Raises:
        ConfigurationError: they cannot, with the reason.
    """
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(2**16))  # a record has a few kilobytes
    except OSError as error:
        raise ConfigurationError(f"folder: {unwritten(folder, error)}") from None


def unwritten(folder: Path, error: Exception) -> str:
    """What a user is told when the disk refuses: the folder, why, and what to do."""
    words = str(error).splitlines()[0]
    if "unexpected pos" in words or "PytorchStreamWriter" in words:  # how torch says that a write was cut short
        words = "the disk took only a part of a file"
    reason = getattr(error, "strerror", None) or words
    return f"nothing can be written into {folder} ({reason}). Free some space, or set WORKBENCH_RUNS to another folder."


@contextmanager
def aside(folder: Path, what: str, ending: str = "") -> Iterator[Path]:
    """A path to write to, until `put_in_place` gives the file its name. Nothing else stays of it, nor of what killed
    processes left.

    Raises:
        UnavailableError: the disk is full, or the folder cannot be written to.
    """
    part = folder / f"{os.urandom(4).hex()}@{platform.node()}.{os.getpid()}-part{ending}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("*-part*"):
            host, _, pid = left.name.partition("-part")[0].rpartition(".")
            if host.rpartition("@")[2] in (host, platform.node()) and pid.isdigit() and not pid_exists(int(pid)):
                left.unlink()
        with ExitStack() as stack:
            stack.callback(part.unlink, missing_ok=True)
            yield part
    except OSError as error:
        why = "the disk is full" if error.errno in FULL else error.strerror or error
        cure = "Free some space, or name another place in the environment variable WORKBENCH_RUNS."
        raise UnavailableError(f"{what} cannot be written to {folder}: {why}. {cure}") from None


def write_whole(path: Path, text: str) -> Path:
    """Write a text file: complete or not at all, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.part")
    try:
        part.write_text(text, encoding="utf-8")
        return put_in_place(part, path.name)
    finally:
        part.unlink(missing_ok=True)


def put_in_place(part: Path, name: str) -> Path:
    """The file under its name in the same folder, whole on the disk before it is there."""
    sync(part)
    return part.replace(part.with_name(name))


def sync(path: Path) -> None:
    """Have the system write a file or a folder out. Windows cannot open folders for this, and does not need to."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def valid_name(name: object) -> bool:
    """1 to 64 letters, digits, dots, dashes and underscores; not `.` or `..`, which are folders."""
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and bool(name.strip("."))


def inside(root: Path, name: str) -> Path:
    """`root / name`.

    Raises:
        ConfigurationError: the name has other characters than letters, digits, `.`, `-` and `_`, or more than 64 of
            them, or the path, links resolved, leaves the root.
    """
    if not valid_name(name):
        raise ConfigurationError(f"name: {name!r:.90} cannot be a file's. Use 1 to 64 letters, digits, dots, - and _.")
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigurationError(f"name: {name!r} is a link that leads out of {root}. Remove it.")
    return path


@cache
def versions() -> dict[str, str]:
    """Versions of Python, the workbench and the libraries that decide a result."""
    found = {"python": sys.version.split()[0]}
    for name, package in (("workbench", DISTRIBUTION), *zip(PACKAGES, PACKAGES, strict=True)):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


@cache
def git_commit() -> str:
    """The commit of the workbench's checkout, `-dirty` with local changes, empty outside of git and from a wheel."""
    if INSTALLED:  # else the repository that the environment happens to lie in would be taken
        return ""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def no_disk() -> str:
    """Why what waits in a temporary file would save no memory: its folder is itself kept there. Empty: it would."""
    mounts = {Path(part.mountpoint): part.fstype for part in disk_partitions(all=True)}
    folder = Path(tempfile.gettempdir()).resolve()
    system = next((mounts[path] for path in (folder, *folder.parents) if path in mounts), "")
    saved = "nothing would be saved. Let the environment variable TMPDIR name a folder on a disk."
    return f"{tempfile.gettempdir()} is itself held in memory (tmpfs), so {saved}" if system in IN_MEMORY else ""
