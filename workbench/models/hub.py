"""Can the Hugging Face hub serve a model? Answered within seconds: its own client retries for most of a minute."""

import threading
from contextlib import suppress

from workbench.errors import ConfigurationError, UnavailableError

HUB_PATIENCE_S = 3.0


def require(repository: str, alternatives: str) -> None:
    """Return if the repository is in the local cache or can be had from the hub.

    Raises:
        ConfigurationError: the hub has no such public model.
        UnavailableError: the hub does not answer, or answers with an error; `alternatives` tells what works without.
    """
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository, "config.json"), str):
        return
    answer = _ask_hub(repository)
    if answer in (401, 403, 404):
        raise ConfigurationError(
            f"model: the Hugging Face hub has no public model {repository!r} (HTTP {answer}). Check the spelling; "
            "for a private one run `hf auth login` and download it first."
        )
    if answer is None or answer >= 400:
        how = "cannot be reached" if answer is None else f"answers HTTP {answer}"
        raise UnavailableError(
            f"model: {repository!r} is not in the local cache, and the Hugging Face hub {how}. "
            f"Check the spelling and the network, or use {alternatives}."
        )


def _ask_hub(repository: str) -> int | None:
    """HTTP status of the repository's config, or None without an answer in time. A thread bounds name look-up too."""
    from huggingface_hub import get_session, hf_hub_url

    answers: list[int] = []

    def ask() -> None:
        with suppress(Exception):  # no answer, of whatever kind
            url = hf_hub_url(repository, "config.json")
            answers.append(get_session().head(url, timeout=HUB_PATIENCE_S, follow_redirects=True).status_code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_PATIENCE_S)
    return next(iter(answers), None)
