"""Checkpoints that are whole or not there: written aside, listed, synced, and renamed at the very end."""

import hashlib
import json
import os
import shutil
from contextlib import AbstractContextManager
from operator import index
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, explain_errors
from workbench.base.paths import is_valid_name, sync
from workbench.journal.record import warn_once

FOLDER = "checkpoints"  # inside the folder of a run
ASIDE = ".aside"  # inside that folder, while a checkpoint is written
# The file that is written last: name, size and hash of the others, and the run's counters.
MANIFEST = "complete.json"
CHECKPOINTS_KEPT = 2  # the newest ones
COUNTERS = ("tokens_seen", "padding_tokens")
# Files that a checkpoint has beside the weights.
NEEDED = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
MANIFEST_CHARACTERS = 1_000_000  # far more than any manifest has; a longer file is not read to its end


def commit(aside: Path, final: Path, counters: dict[str, int]) -> None:
    """Turn a folder that has just been written into a checkpoint, and drop those beyond the newest CHECKPOINTS_KEPT.

    Raises:
        OSError: for example no space left; `final` then does not exist.
    """
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    descriptions = {str(path.relative_to(aside)): _describe(path) for path in files}
    manifest = json.dumps({"counters": counters, "files": descriptions})
    (aside / MANIFEST).write_text(manifest, encoding="utf-8")
    # Everything is on the disk before the folder gets its name, so a folder with that name is a whole checkpoint.
    for path in (*files, aside / MANIFEST, aside):
        sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    # An earlier attempt may have written a checkpoint of the same step.
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    sync(final.parent)
    for old in _by_step(final.parent)[CHECKPOINTS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole and can be read; None if there is none. Newer ones that are passed
    over are named on standard error, once."""
    for checkpoint in _by_step(folder):
        try:
            _check(checkpoint)
            return checkpoint
        except ConfigurationError as error:
            warn_once(f"{error} It is passed over.")
    return None


def name_unusable(what: object, *others: type[Exception]) -> AbstractContextManager[None]:
    """Turn errors over a checkpoint, or a file of it, into a ConfigurationError that names it.

    Args:
        others: types of errors that pass as they are.
    """
    cure = "Remove the folder of this checkpoint; the one before it will do."
    return explain_errors(f"resume: {what} cannot be used", cure, *others)


def read_counters(checkpoint: Path) -> dict[str, int]:
    """Return the counters that `commit` wrote. Raises TypeError for one that is no integer."""
    written = _manifest(checkpoint)["counters"]
    return {name: index(written[name]) for name in COUNTERS}


def _by_step(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first."""
    by_step = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            by_step[int(step)] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def _check(checkpoint: Path) -> None:
    """Check that every file lies in the folder itself, and is as the manifest says.

    Their contents are not checked: the Trainer reads them, and PyTorch runs no code in them.

    Raises:
        ConfigurationError: one is not.
    """
    with name_unusable(f"{MANIFEST} in {checkpoint}"):
        files = dict(_manifest(checkpoint)["files"])
        if not any(name.endswith(".safetensors") for name in files):
            files["model.safetensors"] = None
        read_counters(checkpoint)
    for name in sorted({*NEEDED, *files}):
        with name_unusable(f"{name!r:.90} in {checkpoint}"):
            path = checkpoint / name
            in_folder = is_valid_name(name) and path.is_file() and not path.is_symlink()
            # The size comes first: it shows a file that was cut off without hashing gigabytes.
            if not in_folder or path.stat().st_size != files[name]["bytes"] or _describe(path) != files[name]:
                raise ValueError("it is missing, or not as it was written")


def _manifest(checkpoint: Path) -> Any:
    path = checkpoint / MANIFEST
    if not path.is_file():
        raise ValueError("there is no such file")
    with path.open(encoding="utf-8") as file:
        return json.loads(file.read(MANIFEST_CHARACTERS))


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
