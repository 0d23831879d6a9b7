"""Can the Hugging Face hub serve this? Answered within seconds: loading retries for most of a minute. And its data
sets, as files."""

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
from unittest.mock import patch
from urllib.parse import urlsplit
from urllib.request import getproxies

from workbench.errors import ConfigurationError, UnavailableError, explained

CONNECTION_S = 1.0  # to reach the hub at all
HUB_PATIENCE_S = 3.0  # for its answer
_GIVEN_UP: dict[str, Any] = {}  # what is read from the cache, because the hub could not be reached


def require(repository: str, alternatives: str, kind: str, owner: str, known: Collection[str] = ()) -> tuple[str, bool]:
    """The name under which the hub or the local cache has a "model" or a "dataset", as an old one leads to a new one;
    and whether the hub has said so, asked with the user's token if there is one. A model in the cache is enough: the
    hub is not asked for it, and while it cannot be reached, huggingface_hub is told to work offline.

    Raises:
        ConfigurationError: the hub has no such thing (one of the `known` may be meant), not for this user, or not
            before its conditions are accepted.
        UnavailableError: the hub does not answer, or answers with an error; `alternatives` tells what works without.
    """
    from huggingface_hub import HfApi, constants

    if _GIVEN_UP:  # the last time; perhaps there is a network now
        constants.HF_HUB_OFFLINE = False
        _GIVEN_UP.clear()
    cached = _cached(repository, kind)
    try:
        if not (constants.HF_HUB_OFFLINE or getproxies()):
            _knock(constants.ENDPOINT)
        if cached and kind == "model":
            return cached, not constants.HF_HUB_OFFLINE
        found: Any = HfApi().repo_info(repository, repo_type=kind, timeout=HUB_PATIENCE_S)
        if found.gated:
            HfApi().auth_check(repository, repo_type=kind)
        return str(found.id), True
    except Exception as error:  # of the hub, the network or the settings; what answered has a status
        answer = getattr(getattr(error, "response", None), "status_code", None)
        others = set(known) - {repository}
        near = "".join(f" (did you mean {name}?)" for name in difflib.get_close_matches(repository, others, 1))
        login = "log in with `hf auth login`, with a token that may read it"
        if type(error).__name__ == "GatedRepoError":
            page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"
            words = f"{repository!r} is gated on the Hugging Face hub (HTTP {answer}). Accept its conditions at {page}"
            raise ConfigurationError(f"{owner} {words} and {login}.") from None
        if answer in (401, 403, 404):
            words = f"the Hugging Face hub has no public {kind} {repository!r} (HTTP {answer})"
            raise ConfigurationError(f"{owner} {words}. Check the spelling{near}; for a private one {login}.") from None
        if cached:  # else every file that is read would wait for the hub
            _GIVEN_UP.update({} if constants.HF_HUB_OFFLINE else {repository: answer})
            constants.HF_HUB_OFFLINE = True
            return cached, False
        how = f"answers HTTP {answer}" if answer else "cannot be reached"
        how += " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise UnavailableError(
            f"{owner} {repository!r} is not in the local cache, and the Hugging Face hub {how}. "
            f"Check the spelling{near} and the network, or use {alternatives}."
        ) from None


@lru_cache(maxsize=8)  # each asks the hub
def data_set_files(repository: str, config: str | None, split: str, nothing: str) -> tuple[Path, ...]:
    """The Arrow files of a split of a data set, or of a part of one, `train[:10%]`, in the cache of `datasets`.

    Raises as `require`, with `nothing` about what else the name may be; ConfigurationError: there is no such config,
    split or part, or it is empty.
    """
    known_as, online = require(repository, "a file", "dataset", f"corpus: {nothing}, and")
    import datasets

    cure = f"Name split and config, {repository}:split=train,config=…, or check the network and the disk."
    offline = patch.object(datasets.config, "HF_HUB_OFFLINE", not online or "HF_DATASETS_OFFLINE" in os.environ)
    with offline, explained(f"corpus: the data set {repository!r} cannot be used", cure):
        found = datasets.load_dataset(known_as, config, split=split, keep_in_memory=False)
        if not len(found):
            raise ValueError(f"the split {split} has no rows")
        if "[" in split:  # the files that it is from have all rows
            found = found.with_format("arrow").map(_unchanged, batched=True)
        return tuple(Path(file["filename"]) for file in found.cache_files)


def _unchanged(rows: Any) -> Any:
    return rows


def _cached(repository: str, kind: str) -> str:
    """The name of what is in the cache, if a model's config is there, or anything of one such data set."""
    from huggingface_hub import constants, try_to_load_from_cache

    if kind == "model":
        return repository if isinstance(try_to_load_from_cache(repository, "config.json"), str) else ""
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    names = [path.name.replace("___", "/") for path in folder.glob("*")]
    wanted = repository.replace("_", "").lower()  # `datasets` writes names in small letters, with underlines
    found = [name for name in names if f"/{name}".replace("_", "").endswith(f"/{wanted}")]
    return found[0] if len(found) == 1 else ""


def _knock(url: str) -> None:
    """Raises an error if nothing accepts a connection there. In a thread, as looking a name up knows no timeout."""
    place, door = urlsplit(url), SimpleQueue[Any]()

    def connect() -> None:
        with suppress(OSError):
            door.put(socket.create_connection((place.hostname, place.port or place.scheme), CONNECTION_S / 2))

    Thread(target=connect, daemon=True).start()
    door.get(timeout=CONNECTION_S).close()
