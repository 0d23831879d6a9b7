"""Whether the Hugging Face hub can serve a model or a data set, and its data sets as files.

The answer comes within seconds; loading would retry for most of a minute.
"""

import difflib
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from workbench.base.errors import ConfigurationError, UnavailableError, explained
from workbench.base.patches import replaced

CONNECTION_S = 1.0  # to reach the hub at all
HUB_PATIENCE_S = 3.0  # for its answer
REFUSALS = (401, 403, 404)  # HTTP status: the hub also says 401 where there is no such repository
LOGIN = "log in with `hf auth login`, with a token that may read it"
_GIVEN_UP = set[str]()  # what was read from the cache because the hub did not answer


def require(
    repository: str,
    alternatives: str,
    repo_type: str,
    owner: str,
    known_names: Collection[str] = (),
) -> tuple[str, bool]:
    """The name under which the hub or the local cache has a "model" or a "dataset", and whether the hub said so.

    An old name leads to a new one. The hub is asked with the user's token if there is one. It is not asked for a model
    in the cache, and while it cannot be reached, huggingface_hub is told to work offline.

    Raises:
        ConfigurationError: the hub has no such thing (one of the known names may be meant), not for this user, or not
            before its conditions are accepted.
        UnavailableError: the hub does not answer, or answers with an error; `alternatives` tells what works without.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError

    if _GIVEN_UP:  # the last time; perhaps there is a network now
        constants.HF_HUB_OFFLINE = False
        _GIVEN_UP.clear()
    cached = _cached(repository, repo_type)
    try:
        if not (constants.HF_HUB_OFFLINE or getproxies()):
            _knock(constants.ENDPOINT)
        if cached and repo_type == "model":
            return cached, not constants.HF_HUB_OFFLINE
        info: Any = HfApi().repo_info(repository, repo_type=repo_type, timeout=HUB_PATIENCE_S)
        if info.gated:
            HfApi().auth_check(repository, repo_type=repo_type)
        return str(info.id), True
    except Exception as error:  # of the hub, the network or the settings; only what answered has a status
        status = getattr(getattr(error, "response", None), "status_code", None)
        is_gated = isinstance(error, GatedRepoError)
    if is_gated:
        page = f"{constants.ENDPOINT}/{'datasets/' if repo_type == 'dataset' else ''}{repository}"
        raise ConfigurationError(
            f"{owner} {repository!r} is gated on the Hugging Face hub (HTTP {status}). Accept its conditions at "
            f"{page} and {LOGIN}."
        )
    near = difflib.get_close_matches(repository, known_names, 1)
    spelling = f"Check the spelling (did you mean {near[0]}?)" if near else "Check the spelling"
    if status in REFUSALS:
        raise ConfigurationError(
            f"{owner} the Hugging Face hub has no public {repo_type} {repository!r} (HTTP {status}). {spelling}; for a "
            f"private one {LOGIN}."
        )
    if cached:
        if not constants.HF_HUB_OFFLINE:  # else the user has set it, and it stays
            _GIVEN_UP.add(repository)
        constants.HF_HUB_OFFLINE = True  # or every file that is read would wait for the hub
        return cached, False
    answer = f"answers HTTP {status}" if status else "cannot be reached"
    if constants.HF_HUB_OFFLINE:
        answer += " (HF_HUB_OFFLINE is set)"
    check = "Check the network" if repository in known_names else f"{spelling} and the network"
    raise UnavailableError(
        f"{owner} {repository!r} is not in the local cache, and the Hugging Face hub {answer}. "
        f"{check}, or use {alternatives}."
    )


@lru_cache(maxsize=8)  # the hub is asked each time
def data_set_files(repository: str, config: str | None, split: str, nothing: str) -> tuple[Path, ...]:
    """The Arrow files of a split of a data set, or of a part of one, `train[:10%]`, in the cache of `datasets`.

    Raises as `require`, with `nothing` about what else the name may be; ConfigurationError: there is no such config,
    split or part, or it is empty.
    """
    repository_name, online = require(repository, "a file", "dataset", f"corpus: {nothing}, and")
    import datasets

    offline = not online or "HF_DATASETS_OFFLINE" in os.environ
    cure = f"Name split and config, {repository}:split=train,config=…, or check the network and the disk."
    with (
        replaced(datasets.config, "HF_HUB_OFFLINE", offline),
        explained(f"corpus: the data set {repository!r} cannot be used", cure),
    ):
        rows = datasets.load_dataset(repository_name, config, split=split, keep_in_memory=False)
        if not len(rows):
            raise ValueError(f"the split {split} has no rows")
        if "[" in split:  # the files that a part is from have all rows: it is written into files of its own
            rows = rows.with_format("arrow").map(_unchanged, batched=True)
        return tuple(Path(file["filename"]) for file in rows.cache_files)


def _unchanged(rows: Any) -> Any:
    return rows


def _cached(repository: str, repo_type: str) -> str:
    """The name of what is in the cache: a model whose config is there, or the one data set that may be meant."""
    from huggingface_hub import constants, try_to_load_from_cache

    if repo_type == "model":
        return repository if isinstance(try_to_load_from_cache(repository, "config.json"), str) else ""
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    names = [path.name.replace("___", "/") for path in folder.glob("*")]
    wanted = repository.replace("_", "").lower()  # `datasets` writes names in small letters, with underlines
    matches = [name for name in names if f"/{name}".replace("_", "").endswith(f"/{wanted}")]
    return matches[0] if len(matches) == 1 else ""


def _knock(url: str) -> None:
    """Raises an error if nothing accepts a connection at this address within a second."""
    address = urlsplit(url)
    connections = SimpleQueue[Any]()

    def connect() -> None:
        with suppress(OSError):
            target = (address.hostname, address.port or address.scheme)
            connections.put(socket.create_connection(target, CONNECTION_S / 2))

    # in a thread, because looking up the name of a host has no time-out
    Thread(target=connect, daemon=True).start()
    connections.get(timeout=CONNECTION_S).close()
