"""The files of a model of the hub: they are fetched into the local cache until it is complete, and each is proved."""

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

# The endings of the files at the top of a model's repository that transformers and PEFT read.
READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ADAPTER = "adapter_config.json"
CONFIGS = {ADAPTER, "config.json"}
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def model_files(address: Address, alternatives: str, *, weights: bool, known_names: Collection[str] = ()) -> Path:
    """Return the folder in the cache that has all files of a model, each of them proved.

    Args:
        alternatives: models that work without the hub, for the message.
        weights: whether the weights are needed too.
        known_names: names of models, which the message compares with a name that does not exist.

    Raises:
        ConfigurationError: the hub has no such model or revision (one of the known names may be meant), not for this
            user, or not before its conditions are accepted; or a file is damaged.
        UnavailableError: the hub gives no good answer, and the cache does not have all of it.
    """
    cached = _in_cache(address)
    lacking = _lacking(address, cached, weights)
    if lacking or not is_given_up(address):
        try:
            cached = _fetch_missing(address, repository_info(address), cached, weights)
        except Exception as error:  # the hub, the network, the disk or the settings may fail
            if lacking or isinstance(error, WorkbenchError):
                cached = _in_cache(address)  # some files may have come before the error
                partly = _lacking(address, cached, weights) if cached.is_dir() else ""
                raise hub_error(address, error, "model:", alternatives, partly, known_names) from None
            give_up(address, "model", error)
    prove(cached, f"model: {address}:")
    return cached


def _in_cache(address: Address) -> Path:
    """Return the folder where the cache has the files of the commit that the hub last named; it may not exist."""
    return repository_folder(address) / "snapshots" / (commit_of(address) or "none")


def _fetch_missing(address: Address, info: Any, cached: Path, weights: bool) -> Path:
    """Fetch the files that the cache lacks, and return their folder there.

    Args:
        info: the hub's description of the repository.
        cached: the folder that the cache has of it; the description may name a newer commit.
    """
    from huggingface_hub.errors import RemoteEntryNotFoundError

    names = {file.rfilename for file in info.siblings}
    wanted = _select_files(names, weights)
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
        with suppress(RemoteEntryNotFoundError):  # the cache notes that the hub has no such file
            fetch(address, TOKENIZERS[0], cached.name)
    return cached


def _select_files(names: set[str], weights: bool) -> list[str]:
    """Return the files of a repository that are needed, the config first. Empty: it has no config, so no model."""
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
    """Return the name of a file that a model needs and the cache does not have; empty if it has all."""
    from huggingface_hub import try_to_load_from_cache

    names = {path.name for path in folder.glob("*") if path.is_file()}
    if not names & CONFIGS:
        return "config.json"
    needed = _weights_needed(folder, names) if weights else set()
    # None: the cache does not have the file. An object that is no path: the cache has noted that the hub has none.
    noted = try_to_load_from_cache(address.repository, TOKENIZERS[0], revision=folder.name)
    if noted is None and not names & {*TOKENIZERS, ADAPTER}:
        needed.add(TOKENIZERS[0])
    return min(needed - names, default="")


def _weights_needed(folder: Path, names: set[str]) -> set[str]:
    """Return the names of the files of weights, as the index says, or else the usual ones."""
    if ADAPTER in names:
        return {"adapter_model.safetensors"}
    if INDEX not in names or WHOLE in names:
        return {WHOLE}
    with suppress(ValueError, KeyError, AttributeError):
        return {*json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()}
    return {INDEX}
