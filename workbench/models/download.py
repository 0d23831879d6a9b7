"""The files of a model of the hub: in the local cache, all of them there, each proved."""

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.hub import (
    Address,
    commit_of,
    fetch,
    first_file,
    give_up,
    hub_error,
    is_given_up,
    prove,
    repository_folder,
    repository_info,
)

# the files at the top of a model's repository that transformers and PEFT read
READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_config.json"
CONFIGS = {ADAPTER, "config.json"}
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def model_files(address: Address, alternatives: str, *, weights: bool, known_names: Collection[str] = ()) -> Path:
    """The folder in the cache with the files of a model, all of them there and proved.

    Args:
        alternatives: what works without the hub, for the message.
        weights: they are needed, too.
        known_names: names of which one may be meant.

    Raises:
        ConfigurationError: the hub has no such model or revision (one of the known names may be meant), not for this
            user, or not before its conditions are accepted; or a file is damaged.
        UnavailableError: the hub gives no good answer, and the cache does not have all of it.
    """
    cached = _in_cache(address)
    lacking = _lacking(address, cached, weights)
    if lacking or not is_given_up(address):
        try:
            cached = _fetched(address, repository_info(address), cached, weights)
        except Exception as error:  # of the hub, the network, the disk or the settings
            if lacking or isinstance(error, WorkbenchError):
                cached = _in_cache(address)  # where some files may be by now
                partly = _lacking(address, cached, weights) if cached.is_dir() else ""
                raise hub_error(address, error, "model:", alternatives, partly, known_names) from None
            give_up(address, "model", error)
    prove(cached, f"model: {address}:")
    return cached


def _in_cache(address: Address) -> Path:
    """Where the cache has the files that the hub last named; there may be none."""
    return repository_folder(address) / "snapshots" / (commit_of(address) or "none")


def _fetched(address: Address, info: Any, cached: Path, weights: bool) -> Path:
    """The folder in the cache, after what it lacks has been fetched."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    names = {file.rfilename for file in info.siblings}
    wanted = _wanted(names, weights)
    if not wanted:
        raise ConfigurationError(
            f"model: {str(address)!r} on the hub has no config.json, so it is not a model that "
            "transformers reads. Look at its page for another form of it."
        )
    if cached.name != info.sha:
        cached = first_file(address, wanted[0]).parent
    for name in wanted:
        if not (cached / name).is_file():
            fetch(address, name, cached.name)
    if _lacking(address, cached, weights) == TOKENIZERS[0] and not names & {*TOKENIZERS}:
        with suppress(RemoteEntryNotFoundError):  # the cache takes a note of that
            fetch(address, TOKENIZERS[0], cached.name)
    return cached


def _wanted(names: set[str], weights: bool) -> list[str]:
    """The files to fetch of those that a repository has; the config first. Empty: it is no model's."""
    configs = sorted(names & CONFIGS)
    others = []
    for name in sorted(names - CONFIGS):
        is_weights = name.endswith(".safetensors")
        is_part = name.startswith("model-") and WHOLE in names
        is_unused = is_part or (is_weights and not (weights and WEIGHTS.fullmatch(name)))
        if "/" not in name and name.endswith(READ) and not is_unused:
            others.append(name)
    return [*configs, *others] if configs else []


def _lacking(address: Address, folder: Path, weights: bool) -> str:
    """The first file that a model needs and the cache has not; or empty."""
    from huggingface_hub import try_to_load_from_cache

    names = {path.name for path in folder.glob("*") if path.is_file()}
    if not names & CONFIGS:
        return "config.json"
    needed = _weights_needed(folder, names) if weights else set()
    # None: not in the cache; another object than a path: noted there as missing on the hub
    noted = try_to_load_from_cache(address.repository, TOKENIZERS[0], revision=folder.name)
    if noted is None and not names & {*TOKENIZERS, ADAPTER}:
        needed.add(TOKENIZERS[0])
    return min(needed - names, default="")


def _weights_needed(folder: Path, names: set[str]) -> set[str]:
    if ADAPTER in names:
        return {"adapter_model.safetensors"}
    if INDEX not in names or WHOLE in names:
        return {WHOLE}
    with suppress(ValueError, KeyError, AttributeError):
        return {*json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    return {INDEX}
