"""The errors a user meets. Every message names the value that is wrong and what to do about it."""

from typing import ClassVar


class WorkbenchError(Exception):
    """Base of all errors raised on purpose; the command line prints the message and exits with the code."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(WorkbenchError, ValueError):
    """A recipe, a setting, a text or a parameter cannot be used as given."""

    exit_code: ClassVar[int] = 2


class UnavailableError(WorkbenchError, RuntimeError):
    """The recipe is right, but this machine cannot run it: a device, a package or the network is missing."""

    exit_code: ClassVar[int] = 3


class OutOfMemoryError(WorkbenchError, RuntimeError):
    """A run did not fit; its record has the status `oom`."""

    exit_code: ClassVar[int] = 4
