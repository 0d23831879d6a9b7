"""The names that still hold tensors after a run, and how to free them.

After a failed cell IPython keeps the traceback, whose frames keep every local variable, and it keeps the result of
every cell in `Out`. So `del trainer` alone often frees nothing.
"""

import gc
import sys
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from workbench.base.garbage import clear_frames, collect_garbage, frames_of
from workbench.measure.allocators import live_tensor_bytes, storage_bytes

SHOWN = 10  # names


def holders(device_type: str = "cpu") -> list[tuple[str, int]]:
    """Return the ten names under which most tensors can still be reached, with the bytes of each, most first.

    The names are the variables and the `Out` of the main module (in Jupyter the user's own), and those in the frames of
    the last exception. One tensor may count under several names: all of them have to go.
    """
    sizes: Counter[str] = Counter()
    for name, root in _roots().items():
        sizes[name] = storage_bytes(_reachable(root), device_type)
    return (+sizes).most_common(SHOWN)  # the plus drops names that hold nothing


def release() -> int:
    """Drop what IPython and the last exception keep, free cached memory, and return the bytes that were freed.

    The results of cells (`Out`, `_`, `__`, `___`) are dropped. Variables of your own stay: `holders()` names them.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator else "cpu"
    before = live_tensor_bytes(device_type)
    _forget()
    collect_garbage()
    if accelerator:
        torch.get_device_module(accelerator).empty_cache()
    return before - live_tensor_bytes(device_type)


def _shell() -> Any:
    """Return the running IPython, or None if there is none."""
    if "IPython" not in sys.modules:
        return None
    return sys.modules["IPython"].get_ipython()


def _roots() -> dict[str, Any]:
    """Return by name the objects of the user's variables, the results of cells and the last exception's frames."""
    main = vars(sys.modules["__main__"])
    shell = _shell()
    hidden = {"In", "Out"}
    if shell:
        hidden |= shell.user_ns_hidden.keys()
    roots = {}
    for name, value in main.items():
        if not name.startswith("_") and name not in hidden:
            roots[name] = value
    roots |= {f"Out[{number}]": value for number, value in main.get("Out", {}).items()}
    for name in ("last_exc", "last_value"):
        for frame in frames_of(getattr(sys, name, None)):
            if frame.f_code.co_name != "<module>":  # a module's frame has the variables of the module itself
                roots[f"local variables of {frame.f_code.co_name}(), in the last exception"] = dict(frame.f_locals)
    return {name: root for name, root in roots.items() if not isinstance(root, _NOT_FOLLOWED)}


def _reachable(root: Any) -> Iterator[Any]:
    """Yield an object and all that it refers to, directly or through others, but no modules, classes and functions."""
    seen = {id(root)}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        yield thing
        for other in gc.get_referents(thing):
            if id(other) not in seen and not isinstance(other, _NOT_FOLLOWED):
                seen.add(id(other))
                waiting.append(other)


_NOT_FOLLOWED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, bytes, int, float)


def _forget() -> None:
    """Drop the last exception with what its frames hold, and the results of cells."""
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        kept = vars(sys).pop(name, None)
        if isinstance(kept, BaseException):
            clear_frames(kept)
    shell = _shell()
    if shell:
        shell.displayhook.flush()  # Out, _, __ and ___
        shell.last_execution_result = None  # it holds the exception too
        for name in ("_", "__", "___"):
            shell.user_ns.pop(name, None)
            # IPython notes in `user_ns_hidden`, with the value, what it has put into the user's variables itself.
            shell.user_ns_hidden.pop(name, None)
