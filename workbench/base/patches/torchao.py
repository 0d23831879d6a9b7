"""What is replaced for torchao."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

MODULE = "torchao.prototype.safetensors.safetensors_support"


@contextmanager
def imported_when_called() -> Iterator[None]:
    """While transformers is imported, torchao is not: it comes when one of its functions is called.

    transformers imports it, 130 modules, for functions that read its checkpoints. Until transformers (5.23) imports it
    where it uses it.
    """
    if MODULE in sys.modules:
        yield
        return
    sys.modules[MODULE] = Postponed(MODULE)
    try:
        yield
    finally:
        del sys.modules[MODULE]


class Postponed(ModuleType):
    """Stands for a module, which is imported when one of its functions is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):  # such as `__file__`, for which nobody would call
            raise AttributeError(name)

        def imported_now(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return imported_now
