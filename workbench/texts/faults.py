"""What is wrong with a text, as an error that says what to do."""

from pathlib import Path
from typing import NoReturn

from workbench.base.errors import ConfigurationError


def refusal(message: str) -> ConfigurationError:
    """The error that says what is wrong with a text, and what to do."""
    return ConfigurationError(f"corpus: {message}")


def refuse_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    """Raises ConfigurationError for a file that the system does not let be read."""
    message = f"{path or error.filename} cannot be read: {error.strerror or error}. Check its permissions."
    raise refusal(message) from None
