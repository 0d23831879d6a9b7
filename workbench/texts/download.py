"""The files of a data set of the hub: in the cache of `datasets`, made of files that are proved."""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, WorkbenchError, explained
from workbench.base.hub import (
    Address,
    commit_of,
    fault_of,
    first_file,
    give_up,
    hub_error,
    note_stated,
    prove,
    repository_folder,
    repository_info,
)
from workbench.texts.folders import Loaded, files_of


@lru_cache(maxsize=8)
def data_set_files(address: Address, nothing: str, config: str | None, split: str) -> Loaded:
    """Of a data set of the hub, in the cache of `datasets`; a split may be a part of one, `train[:10%]`.

    Raises as `model_files`, with `nothing` about what else the name may be; ConfigurationError: there is no such
    config, split or part, or it is empty.
    """
    owner = f"corpus: {nothing}, and"
    try:
        info = repository_info(address)
    except Exception as error:  # of the hub, the network or the settings
        commit = commit_of(address)
        rows = None if address.revision and not commit else _prepared(address, commit, config, split)
        if rows is None or isinstance(error, WorkbenchError):
            raise hub_error(address, error, owner, "a file") from None
        give_up(address, "corpus", error)
    else:
        address = replace(address, repository=info.id)
        rows = _prepared(address, info.sha, config or "default", split)
        if rows is None:
            rows = _downloaded(address, info.sha, config, split)
    return files_of(rows, split)


def _downloaded(address: Address, commit: str, config: str | None, split: str) -> Any:
    """The rows of a split, fetched and proved."""
    import datasets
    from huggingface_hub.errors import RemoteEntryNotFoundError

    cure = f"Name split and config, {address}:split=train,config=…, or check the network and the disk."
    snapshot = repository_folder(address) / "snapshots" / commit
    revision = address.revision or None
    try:
        with suppress(RemoteEntryNotFoundError):  # there may be none
            first_file(address, "README.md")
        rows = datasets.load_dataset(address.repository, config, split=split, revision=revision, keep_in_memory=False)
        _note_all(address, snapshot)
    except Exception as error:  # of the hub, the network, the disk or the files
        with suppress(Exception):  # of a hub that has gone
            _note_all(address, snapshot)
        prove(snapshot, f"corpus: {address}:")
        if fault_of(error) or getattr(error, "errno", None):
            raise hub_error(address, error, "corpus:", "a file") from None
        with explained(f"corpus: the data set {str(address)!r} cannot be used", cure):
            raise
    try:
        prove(snapshot, f"corpus: {address}:")
    except ConfigurationError:
        for file in rows.cache_files:  # made of what is damaged
            shutil.rmtree(Path(file["filename"]).parent, ignore_errors=True)
        raise
    return rows


def _note_all(address: Address, snapshot: Path) -> None:
    """Note what the hub states for the files that `datasets` fetched."""
    for path in sorted(snapshot.rglob("*")):
        if path.is_file():
            note_stated(address, path, path.relative_to(snapshot).as_posix())


def _prepared(address: Address, commit: str, config: str | None, split: str) -> Any:
    """The rows of a split as the cache of `datasets` has them of this commit, of the newest where none is known; None
    if it has not, or the name fits several."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    # `datasets` writes names in small letters, with underlines
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
    with suppress(Exception):  # then it is not whole, or has no such split
        names = {"repo_id": repository.replace("___", "/"), "dataset_name": repository.rpartition("___")[2]}
        return Cache(str(cache), config_name=config, version=version, hash=digest, **names).as_dataset(split=split)
    return None
