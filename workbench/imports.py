"""Imports without what libraries do meanwhile and need not."""

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from workbench.errors import needed_extra

TORCHAO = "torchao.prototype.safetensors.safetensors_support"


def imported(module: str = "workbench.run.run") -> Any:
    """The module; by default what trains, which brings torch, transformers and PEFT along.

    Raises:
        UnavailableError: it needs a package of an extra that is not installed.
    """
    try:
        with quick_imports():
            return import_module(module)
    except ModuleNotFoundError as error:
        raise needed_extra(error) or error from None


@contextmanager
def quick_imports() -> Iterator[None]:
    """For the duration, no collection (`pause_collector`), and of what is imported for the first time:

    - bitsandbytes decorates four functions with `torch.compile`, which few recipes use: the compiler, 500 modules, is
      loaded when one is called.
    - transformers (5.23) imports torchao, 130 modules, for functions that read checkpoints of it: when one is called.
    - transformers reads the 549 folders of its models twice, because `@lru_cache` remembers 128 of them: here all.
    """
    with pause_collector(), ExitStack() as stack:
        limited = functools.lru_cache
        stack.callback(setattr, functools, "lru_cache", limited)
        functools.lru_cache = functools.partial(_remembering, limited)
        if TORCHAO not in sys.modules:
            sys.modules[TORCHAO] = Postponed(TORCHAO)
            stack.callback(sys.modules.pop, TORCHAO)
        finder = cast(Any, SimpleNamespace(find_spec=functools.partial(_compile_later, stack)))
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _remembering(limited: Callable[..., Any], maxsize: Any = 128, typed: bool = False) -> Any:
    """`functools.lru_cache`, without a limit for the functions with which transformers reads its folders."""
    if getattr(maxsize, "__module__", None) == "transformers.utils.import_utils":
        return limited(None)(maxsize)
    return limited(maxsize, typed)


def _compile_later(stack: ExitStack, name: str, *_: Any) -> None:
    """Asked where every module is, it knows of none; but before bitsandbytes is loaded it replaces `torch.compile`."""
    if name == "bitsandbytes":
        import torch

        stack.callback(setattr, torch, "compile", torch.compile)
        torch.compile = functools.partial(_later, torch.compile)


def _later(compiled: Callable[..., Any], function: Any = None, **options: Any) -> Callable[..., Any]:
    """`torch.compile`, at the first call for functions of bitsandbytes."""
    if not str(getattr(function, "__module__", "")).startswith("bitsandbytes"):
        return cast("Callable[..., Any]", compiled(function, **options))
    made = functools.cache(functools.partial(compiled, function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: made()(*args, **kwargs))


class Postponed(ModuleType):
    """Stands for a module, which is imported when one of its functions is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # it has no file, nor anything else of a module
            raise AttributeError(name)
        return lambda *args, **named: getattr(import_module(self.__name__), name)(*args, **named)


@contextmanager
def pause_collector() -> Iterator[None]:
    """`gc.disable()` for the duration: imports make many objects and throw none of them away. Afterwards these count
    as old, or the next collection, of the young, would walk all of them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on and not gc.get_freeze_count():  # or those that the caller has frozen would thaw
            gc.freeze()
            gc.unfreeze()
        if was_on:
            gc.enable()
