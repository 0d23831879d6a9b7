"""Can the Hugging Face hub serve a model? Answered within seconds: loading retries for most of a minute."""

import difflib

from workbench.errors import ConfigurationError, UnavailableError
from workbench.models.known import PUBLISHED

HUB_PATIENCE_S = 3.0


def require(repository: str, alternatives: str) -> None:
    """Return if the repository is in the local cache or can be had from the hub, with the user's token if there is one.

    Raises:
        ConfigurationError: the hub has no such model, or not for this user.
        UnavailableError: the hub does not answer, or answers with an error; `alternatives` tells what works without.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repository, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repository, "config.json"), timeout=HUB_PATIENCE_S)
    except Exception as error:  # of the hub, the network or the settings; what answered has a status
        answer = getattr(getattr(error, "response", None), "status_code", None)
        known = PUBLISHED.keys() - {repository}
        near = "".join(f" (did you mean {name}?)" for name in difflib.get_close_matches(repository, known, 1))
        if answer in (401, 403, 404):
            raise ConfigurationError(
                f"model: the Hugging Face hub has no public model {repository!r} (HTTP {answer}). Check the "
                f"spelling{near}; for a private one run `hf auth login` first."
            ) from None
        how = f"answers HTTP {answer}" if answer else "cannot be reached"
        raise UnavailableError(
            f"model: {repository!r} is not in the local cache, and the Hugging Face hub {how}. "
            f"Check the spelling{near} and the network, or use {alternatives}."
        ) from None
