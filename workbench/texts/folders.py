"""Folders of texts: their files, the splits that these belong to, and clones of data sets of the hub."""

import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.base.errors import explain_errors
from workbench.base.patches import replace_attribute
from workbench.texts.faults import refusal, refuse_unreadable
from workbench.texts.files import PLAIN, kind_of

CARD = "README.md"
# The beginning of a card that describes a data set: it names its kind, or its files.
OF_DATA_SET = re.compile(
    r"\ufeff?---[ \t]*\n(?:(?!---).*\n)*?"
    r"(configs|dataset_info|task_categories|task_ids|size_categories|annotations_creators):"
)
# The beginning of the pointer that a clone without `git lfs` has in the place of a file.
LFS = b"version https://git-lfs.github.com/spec/"
Signature = tuple[tuple[Any, ...], ...]
# The Arrow files of a split, and the number of rows in each split.
Loaded = tuple[tuple[Path, ...], dict[str, int]]


def visible_files(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders in it, without hidden ones."""
    visible: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=refuse_unreadable):
        # `os.walk` goes on into the folders that stay in this list.
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
    """Return names, sizes, times and inodes of all files. A change in them means that the text may be another.

    The time of the last change is among them, because the time of writing can be set back.
    """
    facts = []
    for path in paths:
        for file in visible_files(path) if path.is_dir() else [path]:
            try:
                state = file.stat()
            except OSError as error:
                refuse_unreadable(error)
            facts.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return tuple(facts)


def training_files(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """Return the files in a folder that are read: those of these kinds in the training split that `datasets` finds.

    Raises ConfigurationError: there are several kinds of files, or the names do not say which are for training.
    """
    from datasets.data_files import FILES_TO_IGNORE

    files = [path for path in visible_files(folder) if kind_of(path) in kinds and path.name not in FILES_TO_IGNORE]
    names = [path.relative_to(folder).as_posix() for path in files]
    training = _training_split(names, folder)
    if training is not None:
        files = [path for path, name in zip(files, names, strict=True) if name in training]
    kinds_read = sorted({"text" if kind_of(path) in PLAIN else kind_of(path) for path in files})
    if len(kinds_read) > 1:
        raise refusal(
            f"{folder} has files of several kinds ({', '.join(kinds_read)}), which may hold the same examples. Keep "
            "one kind there, or name a file."
        )
    # Parts of one dataset differ by their numbers: part-1.jsonl, part-2.jsonl. Texts may have any names.
    stems = {re.sub(r"[\W\d_]", "", path.name.partition(".")[0]) for path in files}
    if training is None and kinds_read != ["text"] and len(stems) > 1:
        shown = ", ".join(names[:5])
        raise refusal(
            f"the names of the files in {folder} do not say which are for training: {shown}. Name one of them, or "
            "give them names that `datasets` knows, such as train-1.jsonl and test-1.jsonl."
        )
    return files


def _training_split(names: list[str], folder: Path) -> set[str] | None:
    """Return the names of the training split by the patterns of `datasets`; None if they match no split.

    Raises ConfigurationError: they match other splits alone.
    """
    from datasets.data_files import ALL_DEFAULT_PATTERNS, DEFAULT_PATTERNS_ALL, SPLIT_PATTERN_SHARDED
    from fsspec.utils import glob_translate

    shards = {split: [SPLIT_PATTERN_SHARDED.format(split=split)] for split in ("train", "*")}
    for patterns_by_split in (shards, *ALL_DEFAULT_PATTERNS):
        if patterns_by_split == DEFAULT_PATTERNS_ALL:  # for names that tell no split
            continue
        matches = {}
        for split, patterns in patterns_by_split.items():
            expressions = [re.compile(glob_translate(pattern)) for pattern in patterns]
            matches[str(split)] = {name for name in names if any(e.fullmatch(name) for e in expressions)}
        if matches.get("train"):
            return matches["train"]
        others = ", ".join(sorted(set().union(*matches.values()))[:5])
        if others:
            raise refusal(f"{folder} has files of other splits than train alone: {others}. Name the file to train on.")
    return None


def is_data_set(folder: Path) -> bool:
    """Whether a folder is a clone of a data set of the hub: its card says so."""
    card = folder / CARD
    return card.is_file() and bool(OF_DATA_SET.match(card.read_text(encoding="utf-8", errors="replace")))


def load_data_set(folder: Path, config: str | None, split: str) -> Loaded:
    """Load a split of a data set from its clone, and return its Arrow files in the cache of `datasets`.

    Raises:
        ConfigurationError: there is no such config or split, or the files cannot be used.
    """
    return _load_data_set(folder.resolve(), config, split, signature_of([folder]))


@lru_cache(maxsize=8)
def _load_data_set(folder: Path, config: str | None, split: str, signature: Signature) -> Loaded:
    import datasets

    cure = f"Name split and config, {folder}:split=train,config=…, or correct the card, {CARD}."
    for name, size, *_ in signature:
        if size < 200 and Path(name).read_bytes().startswith(LFS):
            raise refusal(f"{name} is a pointer of Git LFS, without the data. Run: git lfs pull")
    # `datasets` would use its cache of a folder even if a file has changed, so each state has its own cache.
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
    cache = Path(datasets.config.HF_DATASETS_CACHE, f"folder-{digest}")
    with (
        replace_attribute(datasets.config, "HF_HUB_OFFLINE", True),
        explain_errors(f"corpus: the data set in the folder {folder} cannot be used", cure),
    ):
        rows = datasets.load_dataset(str(folder), config, split=split, cache_dir=str(cache), keep_in_memory=False)
        return files_of(rows, split)


def files_of(rows: Any, split: str) -> Loaded:
    """Return the Arrow files of rows that `datasets` has loaded. Raises ConfigurationError if there are no rows."""
    if not len(rows):
        raise refusal(f"the split {split} has no rows. Name another one.")
    # The files of a part of a split have all rows of the split: write the part into files of its own.
    if "[" in split:
        rows = rows.with_format("arrow").map(_copy_rows, batched=True)
    counts = {name: info.num_examples for name, info in (rows.info.splits or {}).items()}
    return tuple(Path(file["filename"]) for file in rows.cache_files), counts


def _copy_rows(rows: Any) -> Any:
    """Return rows as they are: `map` copies them into its own files."""
    return rows
