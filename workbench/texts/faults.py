"""The errors about a text: each says what is wrong, and what to do."""

from pathlib import Path
from typing import NoReturn

from workbench.base.errors import ConfigurationError


def refusal(message: str) -> ConfigurationError:
    """Make the error that says what is wrong with a text, and what to do."""
    return ConfigurationError(f"corpus: {message}")


def refuse_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    """Raise ConfigurationError for a file that the system refuses to read."""
    message = f"{path or error.filename} cannot be read: {error.strerror or error}. Check its permissions."
    raise refusal(message) from None
