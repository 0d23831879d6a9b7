"""Folders of texts: what is in them, which files are of which split, and the clones of data sets of the hub."""

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.base.errors import explained
from workbench.base.patches import replaced
from workbench.texts.faults import refusal, refuse_unreadable

CARD = "README.md"
LFS = b"version https://git-lfs.github.com/spec/"  # what a clone without `git lfs` has in the place of a file
FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
OF_DATA_SETS = {"configs", "dataset_info", "task_categories", "task_ids", "size_categories", "annotations_creators"}
TRAIN = "train"
SPLITS = {  # as a part of a name says it
    "train": TRAIN,
    "training": TRAIN,
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}
Signature = tuple[tuple[Any, ...], ...]


def visible_files(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, hidden ones left out."""
    visible: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=refuse_unreadable):
        # `os.walk` goes on into the folders that stay in this list
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            link = Path(place, name)
            if link.is_symlink():
                raise refusal(
                    f"{link} is a link to a folder, which is not followed. Put the folder there, or remove it."
                )
        visible += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def signature_of(paths: list[Path]) -> Signature:
    """Names, sizes, times of change and inodes of all files: another one means that the text may be another. A time
    of writing can be set back, one of change cannot."""
    facts = []
    for path in paths:
        for file in visible_files(path) if path.is_dir() else [path]:
            try:
                state = file.stat()
            except OSError as error:
                refuse_unreadable(error)
            facts.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return tuple(facts)


def by_split(files: list[Path], folder: Path) -> dict[str, list[Path]]:
    """The files by the split that their names say, as `datasets` sees it; empty where they tell no training split from
    another."""
    splits: dict[str, list[Path]] = {}
    for path in files:
        parts = re.split(r"[^a-z]+", path.relative_to(folder).as_posix().lower())
        names = [SPLITS[part] for part in parts if part in SPLITS]
        splits.setdefault(names[-1] if names else "", []).append(path)
    if TRAIN not in splits or len(splits.keys() - {""}) == 1:
        return {}
    splits[TRAIN] = sorted([*splits[TRAIN], *splits.pop("", [])])
    return splits


def is_data_set(folder: Path) -> bool:
    """Whether a folder is a clone of a data set of the hub: its card says so."""
    card = folder / CARD
    if not card.is_file():
        return False
    import yaml

    match = FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace"))
    try:
        facts = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return False
    return isinstance(facts, dict) and bool(facts.keys() & OF_DATA_SETS)


def load_data_set(folder: Path, config: str | None, split: str) -> tuple[tuple[Path, ...], dict[str, int]]:
    """The Arrow files of a split of such a folder, in the cache of `datasets`, and the rows of each split.

    Raises:
        ConfigurationError: there is no such config or split, or the files cannot be used.
    """
    return _load_data_set(folder.resolve(), config, split, signature_of([folder]))


@lru_cache(maxsize=8)
def _load_data_set(
    folder: Path, config: str | None, split: str, signature: Signature
) -> tuple[tuple[Path, ...], dict[str, int]]:
    import datasets

    cure = f"Name split and config, {folder}:split=train,config=…, or correct the card, {CARD}."
    for name, size, *_ in signature:
        if size < 200 and Path(name).read_bytes().startswith(LFS):
            raise refusal(f"{name} is a pointer of Git LFS, without the data. Run: git lfs pull")
    # `datasets` takes what it cached of a folder for the folder, though a file has changed meanwhile
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
    cache = Path(datasets.config.HF_DATASETS_CACHE, f"folder-{digest}")
    with (
        replaced(datasets.config, "HF_HUB_OFFLINE", True),
        explained(f"corpus: the data set in the folder {folder} cannot be used", cure),
    ):
        rows = datasets.load_dataset(str(folder), config, split=split, cache_dir=str(cache), keep_in_memory=False)
        if not len(rows):
            raise ValueError(f"the split {split} has no rows")
        if "[" in split:  # the files that a part is from have all rows: it is written into files of its own
            rows = rows.with_format("arrow").map(lambda batch: batch, batched=True)
        counts = {name: info.num_examples for name, info in (rows.info.splits or {}).items()}
        return tuple(Path(file["filename"]) for file in rows.cache_files), counts
