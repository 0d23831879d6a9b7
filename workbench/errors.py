"""The errors that a user can cause. All of them are a `WorkbenchError`; their message names the value and the cure."""

from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError, WorkbenchError

__all__ = ["ConfigurationError", "OutOfMemoryError", "UnavailableError", "WorkbenchError"]
