"""The errors a user meets. Every message names the value that is wrong and what to do about it."""


class WorkbenchError(Exception):
    """Base of all errors raised on purpose; the command line prints the message without a traceback."""


class ConfigurationError(WorkbenchError, ValueError):
    """A recipe, a setting, a text or a parameter cannot be used as given."""


class UnavailableError(WorkbenchError, RuntimeError):
    """The recipe is right, but this machine cannot run it: a device, a package or the network is missing."""
