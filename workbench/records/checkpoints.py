"""Checkpoints that are whole or not there: written aside, listed, synced, and renamed at the very end."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "complete.json"  # the last file to be written: name, size and hash of the others, and the run's counters
CHECKPOINTS_KEPT = 2


def commit(aside: Path, final: Path, counters: dict[str, int]) -> None:
    """Turn a folder that has just been written into a checkpoint, and drop those beyond the newest KEPT.

    Raises:
        OSError: for example no space left; `final` then does not exist.
    """
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    manifest = {"counters": counters, "files": {str(path.relative_to(aside)): _described(path) for path in files}}
    (aside / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in (*files, aside / MANIFEST, aside):
        _sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(final, ignore_errors=True)  # from an earlier attempt at the same step
    os.replace(aside, final)
    _sync(final.parent)
    for old in _by_step(final.parent)[CHECKPOINTS_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose every file is what its manifest says; damaged ones are passed over."""
    return next((path for path in _by_step(folder) if _whole(path)), None)


def counters(checkpoint: Path) -> dict[str, int]:
    """What `commit` was given."""
    return dict(_manifest(checkpoint)["counters"])


def _by_step(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)


def _whole(checkpoint: Path) -> bool:
    try:
        files = _manifest(checkpoint)["files"]
        return all(_described(checkpoint / name) == described for name, described in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _manifest(checkpoint: Path) -> Any:
    return json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Have the system write it out. Windows cannot open folders for this, and does not need to."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
