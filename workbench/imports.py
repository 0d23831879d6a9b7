"""Quick imports: without the work that libraries do while they are imported, and that most recipes never need."""

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
    """Import a module; by default the one that trains, which brings torch, transformers and PEFT along.

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
    """For the duration, no garbage collection (`pause_collector`), and of what is imported for the first time:

    - bitsandbytes decorates four functions with `torch.compile`, which few recipes use: the compiler, 500 modules, is
      loaded when one of them is called.
    - transformers (5.23) imports torchao, 130 modules, for functions that read its checkpoints: when one is called.
    - transformers reads the 549 folders of its models twice, because `@lru_cache` remembers 128 of them: here all.
    """
    with pause_collector(), ExitStack() as stack:
        lru_cache = functools.lru_cache
        stack.callback(setattr, functools, "lru_cache", lru_cache)
        functools.lru_cache = functools.partial(_cache_all_folders, lru_cache)
        if TORCHAO not in sys.modules:
            sys.modules[TORCHAO] = Postponed(TORCHAO)
            stack.callback(sys.modules.pop, TORCHAO)
        # Python asks the finders in turn where a module is: the first one sees every import
        finder = cast(Any, SimpleNamespace(find_spec=functools.partial(_watch_for_bitsandbytes, stack)))
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _cache_all_folders(lru_cache: Callable[..., Any], maxsize: Any = 128, typed: bool = False) -> Any:
    """`functools.lru_cache`, without a limit for the functions with which transformers reads its folders."""
    # written `@lru_cache` without brackets, its first argument is the function
    if getattr(maxsize, "__module__", None) == "transformers.utils.import_utils":
        return lru_cache(None)(maxsize)
    return lru_cache(maxsize, typed)


def _watch_for_bitsandbytes(stack: ExitStack, name: str, *_: Any) -> None:
    """A finder that finds no module, but replaces `torch.compile` before bitsandbytes is loaded."""
    if name == "bitsandbytes":
        import torch

        stack.callback(setattr, torch, "compile", torch.compile)
        torch.compile = functools.partial(_compile_at_first_call, torch.compile)


def _compile_at_first_call(
    torch_compile: Callable[..., Any], function: Any = None, **options: Any
) -> Callable[..., Any]:
    """`torch.compile`, which waits for the first call if the function is bitsandbytes'."""
    if not str(getattr(function, "__module__", "")).startswith("bitsandbytes"):
        return cast("Callable[..., Any]", torch_compile(function, **options))
    compiled = functools.cache(functools.partial(torch_compile, function, **options))
    return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))


class Postponed(ModuleType):
    """Stands for a module, which is imported when one of its functions is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # such as `__file__`, for which nobody would call
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(import_module(self.__name__), name)(*args, **kwargs)


@contextmanager
def pause_collector() -> Iterator[None]:
    """`gc.disable()` for the duration: imports make many objects and throw none of them away."""
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
