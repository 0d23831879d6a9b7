"""Checkpoints that are whole or not there: written aside, listed, synced, and renamed at the very end."""

import hashlib
import json
import os
import shutil
from contextlib import AbstractContextManager
from operator import index
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, explained
from workbench.base.paths import sync, valid_name
from workbench.journal.record import warn_once

FOLDER = "checkpoints"  # inside the folder of a run
ASIDE = ".aside"  # inside that folder, while one is written
# the last file to be written: name, size and hash of the others, and the run's counters
MANIFEST = "complete.json"
CHECKPOINTS_KEPT = 2
COUNTERS = ("tokens_seen", "padding_tokens")
# files beside the weights
NEEDED = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
MANIFEST_CHARACTERS = 1_000_000  # far more than any manifest has: of a longer file, no more is read


def commit(aside: Path, final: Path, counters: dict[str, int]) -> None:
    """Turn a folder that has just been written into a checkpoint, and drop those beyond the newest CHECKPOINTS_KEPT.

    Raises:
        OSError: for example no space left; `final` then does not exist.
    """
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    described = {str(path.relative_to(aside)): _described(path) for path in files}
    manifest = json.dumps({"counters": counters, "files": described})
    (aside / MANIFEST).write_text(manifest, encoding="utf-8")
    # everything is on the disk before the folder gets its name, so a checkpoint that can be seen is whole
    for path in (*files, aside / MANIFEST, aside):
        sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(final, ignore_errors=True)  # from an earlier attempt at the same step
    os.replace(aside, final)
    sync(final.parent)
    for old in _by_step(final.parent)[CHECKPOINTS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that is whole and can be read. Those passed over are named on standard error, once."""
    for checkpoint in _by_step(folder):
        try:
            _check(checkpoint)
            return checkpoint
        except ConfigurationError as error:
            warn_once(f"{error} It is passed over.")
    return None


def unusable(what: object, *others: type[Exception]) -> AbstractContextManager[None]:
    """Whatever goes wrong with a checkpoint, or a file of it, becomes a ConfigurationError that names it."""
    cure = "Remove the folder of this checkpoint; the one before it will do."
    return explained(f"resume: {what} cannot be used", cure, *others)


def counters(checkpoint: Path) -> dict[str, int]:
    """The counters that `commit` wrote. Raises TypeError for one that is no integer."""
    written = _manifest(checkpoint)["counters"]
    return {name: index(written[name]) for name in COUNTERS}


def _by_step(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first."""
    by_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            by_step[int(step)] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _check(checkpoint: Path) -> None:
    """Raises ConfigurationError unless every file lies in the folder itself and is as the manifest says.

    What is in them the Trainer reads, and PyTorch runs no code in it.
    """
    with unusable(f"{MANIFEST} in {checkpoint}"):
        files = dict(_manifest(checkpoint)["files"])
        if not any(name.endswith(".safetensors") for name in files):
            files["model.safetensors"] = None
        counters(checkpoint)
    for name in sorted({*NEEDED, *files}):
        with unusable(f"{name!r:.90} in {checkpoint}"):
            path = checkpoint / name
            in_folder = valid_name(name) and path.is_file() and not path.is_symlink()
            # the size first: it shows a file that was cut off without hashing gigabytes
            if not in_folder or path.stat().st_size != files[name]["bytes"] or _described(path) != files[name]:
                raise ValueError("it is missing, or not as it was written")


def _manifest(checkpoint: Path) -> Any:
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError("there is no such file")
    with path.open(encoding="utf-8") as file:
        return json.loads(file.read(MANIFEST_CHARACTERS))


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
