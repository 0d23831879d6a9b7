"""The errors a user meets. Every message names the value that is wrong and what to do about it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

DISTRIBUTION = "gpt2-memory-workbench"


class WorkbenchError(Exception):
    """Base of all errors raised on purpose; the command line prints the message and exits with the code."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        return visible(super().__str__())


def visible(text: str) -> str:
    """Return the text with `\\x1b` for an escape, and so on: characters without a shape could colour, move or reverse
    what a terminal shows."""
    return SHAPELESS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


# Characters without a shape are controls (tab and newline are let through), soft hyphens, marks and overrides of
# direction, separators, surrogates and tags.
SHAPELESS = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


class ConfigurationError(WorkbenchError, ValueError):
    """A recipe, a setting, a text or a parameter cannot be used as given."""

    exit_code: ClassVar[int] = 2


class UnavailableError(WorkbenchError, RuntimeError):
    """The recipe is right, but this machine cannot run it: a device, a package or the network is missing."""

    exit_code: ClassVar[int] = 3


@contextmanager
def explain_errors(what: str, cure: str, *others: type[Exception]) -> Iterator[None]:
    """Turn any error that a library raises over a file that it cannot use into a ConfigurationError.

    The message says `what` is wrong, in brackets what the library says, and the `cure`.

    Args:
        others: errors that have other causes than the file, and stay what they are.
    """
    try:
        yield
    except Exception as error:  # errors of all kinds, because nobody knows what is in the file
        if isinstance(error, (WorkbenchError, *others)):
            raise
        raise ConfigurationError(f"{what} ({in_a_line(error)}). {cure}") from None


def brief(value: object) -> str:
    """Return the value as Python writes it, cut at 90 characters."""
    try:
        return f"{value!r:.90}"
    except (ValueError, RecursionError):  # Python writes no more than 4,300 digits, and only so many nested brackets
        return f"a {type(value).__name__} that is too long to be written"


def in_a_line(error: Exception) -> str:
    """Return the message of an error, without line breaks and cut at 300 characters.

    The name of the error's class stands before it if the message alone says too little.
    """
    message = " ".join(str(error).split())
    pydantic_errors = getattr(error, "errors", None)
    if pydantic_errors:
        faults = []
        for fault in pydantic_errors():
            field = ".".join(map(str, fault["loc"]))
            faults.append(f"{field}: {fault['msg']}" if field else fault["msg"])
        message = ", or ".join(dict.fromkeys(faults))  # pydantic repeats a fault for each type of a union
    message = f"{message:.300}"
    if isinstance(error, KeyError) or not message:
        message = f"{type(error).__name__} {message}"
    return message.strip(" .")


def missing_extra_error(error: ModuleNotFoundError) -> UnavailableError | None:
    """Return an error that says what to install, if the missing package belongs to an extra of pyproject.toml; else
    None."""
    from importlib.metadata import PackageNotFoundError, requires

    missing = str(error.name).partition(".")[0]
    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # the workbench is imported from where it lies, and was never installed
        return None
    for requirement in declared:
        # A requirement reads: torchao>=0.18; extra == 'optimizers'
        match = re.fullmatch(rf"{missing}\b(?!-).*extra == ['\"]([\w-]+)['\"]", requirement, flags=re.IGNORECASE)
        if match:
            return UnavailableError(
                f"workbench: this needs the package {missing}, which is not installed. "
                f'Install it with: pip install "{DISTRIBUTION}[{match[1]}]"'
            )
    return None


class OutOfMemoryError(WorkbenchError, RuntimeError):
    """A run did not fit into memory.

    Its record, `record_id`, has the status `oom` and says where; `workbench.diagnose` tells what to change.
    """

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, record_id: str = "") -> None:
        super().__init__(message)
        self.record_id = record_id
