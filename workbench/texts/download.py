"""The rows of a data set of the hub: in the cache of `datasets`, made of files that are proved."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, WorkbenchError, explain_errors
from workbench.base.hub import (
    Address,
    commit_of,
    disk_refusal_in,
    fault_of,
    first_file,
    give_up,
    hub_error,
    note_hash,
    prove,
    repository_folder,
    repository_info,
    wait_for,
)
from workbench.texts.folders import Loaded, files_of


@lru_cache(maxsize=8)
def data_set_files(address: Address, nothing: str, config: str | None, split: str) -> Loaded:
    """Return the Arrow files of a split in the cache of `datasets`; the split may be a part of one, `train[:10%]`.

    Args:
        nothing: says that the name is nothing else, for the message.

    Raises as `model_files` does; and ConfigurationError, if there is no such config, split or part, or it is empty.
    """
    owner = f"corpus: {nothing}, and"
    try:
        info = repository_info(address)
    except Exception as error:  # the hub, the network or the settings may fail
        commit = commit_of(address)
        rows = None
        if commit or not address.revision:
            rows = _find_in_cache(address, commit, config, split)
        if rows is None or isinstance(error, WorkbenchError):
            raise hub_error(address, error, owner, "a file") from None
        give_up(address, "corpus", error)
    else:
        address = replace(address, repository=info.id)
        rows = _find_in_cache(address, info.sha, config or "default", split)
        if rows is None:
            rows = _download(address, info.sha, config, split)
    return files_of(rows, split)


def _download(address: Address, commit: str, config: str | None, split: str) -> Any:
    """Fetch and prove the rows of a split."""
    import datasets
    from huggingface_hub.errors import RemoteEntryNotFoundError

    cure = f"Name split and config, {address}:split=train,config=…, or check the network and the disk."
    snapshot = repository_folder(address) / "snapshots" / commit
    revision = address.revision or None
    try:
        with suppress(RemoteEntryNotFoundError):  # a data set may have none
            first_file(address, "README.md")
        rows = wait_for(
            address,
            "the files",
            lambda: datasets.load_dataset(
                address.repository, config, split=split, revision=revision, keep_in_memory=False
            ),
            cache_of_datasets(),
        )
        _note_all(address, snapshot)
    except Exception as error:  # the hub, the network, the disk or the files may fail
        with suppress(Exception):  # the hub may be out of reach by now
            _note_all(address, snapshot)
        prove(snapshot, f"corpus: {address}:")
        if fault_of(error) or disk_refusal_in(error):
            raise hub_error(address, error, "corpus:", "a file") from None
        with explain_errors(f"corpus: the data set {str(address)!r} cannot be used", cure):
            raise
    try:
        prove(snapshot, f"corpus: {address}:")
    except ConfigurationError:
        for file in rows.cache_files:  # these files were made of damaged ones
            shutil.rmtree(Path(file["filename"]).parent, ignore_errors=True)
        raise
    return rows


def cache_of_datasets() -> Path:
    """Return the folder in which `datasets` keeps what it has made of the files of the hub."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))


def _note_all(address: Address, snapshot: Path) -> None:
    """Note what the hub states for the files that `datasets` fetched."""
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            note_hash(address, path, path.relative_to(snapshot).as_posix())


def _find_in_cache(address: Address, commit: str, config: str | None, split: str) -> Any:
    """Return the rows of a split from the cache of `datasets`.

    They are those of the commit, or of the newest one in the cache if `commit` is empty. None: the cache does not have
    them, or the name fits several data sets.
    """
    cache = cache_of_datasets()
    # `datasets` writes names in small letters, with underlines.
    wanted = address.repository.replace("_", "").lower()
    folders = []
    for folder in cache.glob(f"*/{config or '*'}/*/{commit or '*'}"):
        if f"/{folder.parts[-4]}".replace("___", "/").replace("_", "").endswith(f"/{wanted}"):
            folders.append(folder)
    if len({folder.parts[-4] for folder in folders}) != 1 or (commit and len(folders) > 1):
        return None
    from datasets.packaged_modules.cache.cache import Cache

    newest = max(folders, key=lambda path: path.stat().st_mtime)
    *_, repository, config, version, digest = newest.parts
    with suppress(Exception):  # the cache may be incomplete, or have no such split
        names = {"repo_id": repository.replace("___", "/"), "dataset_name": repository.rpartition("___")[2]}
        return Cache(str(cache), config_name=config, version=version, hash=digest, **names).as_dataset(split=split)
    return None
