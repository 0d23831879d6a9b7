"""What is replaced for bitsandbytes."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from workbench.base.patches import replaced


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """While bitsandbytes is imported, what it decorates with `torch.compile` waits for its first call.

    These are four functions, which few recipes use, and the compiler is 500 modules: 1.4 s. Until bitsandbytes (0.50)
    compiles when it is called.
    """
    with ExitStack() as stack:
        watch = _ImportWatch(stack)
        sys.meta_path.insert(0, watch)
        stack.callback(sys.meta_path.remove, watch)
        yield


class _ImportWatch:
    """A finder of modules that finds none, and replaces `torch.compile` when bitsandbytes is about to be loaded.

    Python asks the finders in turn where a module is: the first one sees every import.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "bitsandbytes":
            import torch

            at_first_call = functools.partial(_compile_at_first_call, torch.compile)
            self.stack.enter_context(replaced(torch, "compile", at_first_call))


def _compile_at_first_call(
    torch_compile: Callable[..., Any], function: Any = None, **options: Any
) -> Callable[..., Any]:
    """`torch.compile`, which waits for the first call if the function is bitsandbytes'."""
    if not str(getattr(function, "__module__", "")).startswith("bitsandbytes"):
        return cast("Callable[..., Any]", torch_compile(function, **options))
    compiled = functools.cache(functools.partial(torch_compile, function, **options))

    @functools.wraps(function)
    def compiled_later(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return compiled_later
