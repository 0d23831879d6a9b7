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
    prove,
    repository_folder,
    repository_info,
)


@lru_cache(maxsize=8)
def data_set_files(address: Address, config: str | None, split: str, nothing: str) -> tuple[Path, ...]:
    """The Arrow files of a split of a data set, or of a part of one, `train[:10%]`, in the cache of `datasets`.

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
    if not len(rows):
        raise ConfigurationError(f"corpus: the split {split} of {str(address)!r} has no rows. Name another one.")
    if "[" in split:  # the files that a part is from have all rows: it is written into files of its own
        rows = rows.with_format("arrow").map(_unchanged, batched=True)
    return tuple(Path(file["filename"]) for file in rows.cache_files)


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
    except Exception as error:  # of the hub, the network, the disk or the files
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


def _prepared(address: Address, commit: str, config: str | None, split: str) -> Any:
    """The rows of a split as the cache of `datasets` has them of this commit, of the newest where none is known; None
    if it has not, or the name fits several."""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    wanted = address.repository.replace("_", "").lower()  # `datasets` writes names in small letters, with underlines
    names = [path.name for path in cache.glob("*")]
    matches = [name for name in names if f"/{name}".replace("___", "/").replace("_", "").endswith(f"/{wanted}")]
    if len(matches) != 1:
        return None
    folders = sorted(
        cache.glob(f"{matches[0]}/{config or '*'}/*/{commit or '*'}"), key=lambda path: path.stat().st_mtime
    )
    if not folders or (commit and len(folders) > 1):
        return None
    from datasets.packaged_modules.cache.cache import Cache

    repository = matches[0].replace("___", "/")
    newest = folders[-1]
    kept = {"config_name": newest.parts[-3], "version": newest.parts[-2], "hash": newest.name}
    with suppress(Exception):  # then it is not whole, or has no such split
        name = repository.rpartition("/")[2]
        return Cache(str(cache), dataset_name=name, repo_id=repository, **kept).as_dataset(split=split)
    return None


def _unchanged(rows: Any) -> Any:
    return rows
