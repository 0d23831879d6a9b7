"""Quick imports: without collecting garbage meanwhile, which finds none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from workbench.base.errors import needed_extra


def imported(module: str = "workbench.training.run") -> Any:
    """Import a module; by default the one that trains, which brings torch, transformers and PEFT along.

    Raises:
        UnavailableError: it needs a package of an extra that is not installed.
    """
    try:
        with pause_collector():
            return import_module(module)
    except ModuleNotFoundError as error:
        raise needed_extra(error) or error from None


@contextmanager
def pause_collector() -> Iterator[None]:
    """`gc.disable()` for the duration: imports make many objects and throw none of them away (0.9 s of a processor)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # freezing and thawing makes the new objects old: otherwise the next collection, of the young, would walk all of
        # them. Not if the caller has frozen some, which would thaw too.
        if was_on and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()
