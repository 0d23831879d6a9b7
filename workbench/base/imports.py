"""Quick imports: garbage is not collected meanwhile, since there is none to find."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from workbench.base.errors import missing_extra_error


def import_quickly(module: str) -> Any:
    """Import a module while the garbage collector pauses.

    Raises:
        UnavailableError: it needs a package of an extra that is not installed.
    """
    try:
        with pause_collector():
            return import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra_error(error) or error from None


@contextmanager
def pause_collector() -> Iterator[None]:
    """Stop the garbage collector: imports make many objects and throw none of them away, so that it would take 0.9 s
    of a processor to find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Freezing and thawing makes the new objects old; otherwise the next collection, which is of the young ones,
        # would walk them all. If the caller has frozen objects, they would thaw too, so that nothing is done then.
        if was_on and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()
