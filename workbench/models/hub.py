"""Can the Hugging Face hub serve a model? Answered within seconds: its own client retries for most of a minute."""

import http.client
import threading
import urllib.error
import urllib.request

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
    if answer is None:
        raise UnavailableError(
            f"model: {repository!r} is not in the local cache, and the Hugging Face hub cannot be reached. "
            f"Check the spelling and the network, or use {alternatives}."
        )
    if answer in (401, 403, 404):
        raise ConfigurationError(
            f"model: the Hugging Face hub has no public model {repository!r} (HTTP {answer}). Check the spelling; "
            "for a private one run `hf auth login` and download it first."
        )
    if answer >= 400:
        raise UnavailableError(
            f"model: the Hugging Face hub answers HTTP {answer} for {repository!r}. Try later, or use {alternatives}."
        )


def _ask_hub(repository: str) -> int | None:
    """HTTP status of the repository's config, or None without an answer in time. A thread bounds name look-up too."""
    from huggingface_hub import constants, hf_hub_url

    answers: list[int] = []

    def ask() -> None:
        request = urllib.request.Request(hf_hub_url(repository, "config.json"), method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=HUB_PATIENCE_S) as response:
                answers.append(response.status)
        except (OSError, http.client.HTTPException) as error:  # an answer that says no is an error too, with its code
            answers.extend([error.code] if isinstance(error, urllib.error.HTTPError) else [])

    if not constants.HF_HUB_OFFLINE:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(HUB_PATIENCE_S)
    return next(iter(answers), None)
