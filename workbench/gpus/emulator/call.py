"""Calling a function on an emulated GPU: in a child process, one for each card, kept for the next call."""

import atexit
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import emulated_card
from workbench.gpus.emulator.launch import environment
from workbench.gpus.process import Worker

P = ParamSpec("P")
R = TypeVar("R")

MOST_PROCESSES = 4

_lock = threading.Lock()
_workers: dict[str, Worker] = {}


def call_on(
    gpu: Gpu, function: Callable[..., R], *args: Any, modules: Sequence[str] = (), time_limit: float | None = None,
    **kwargs: Any,
) -> R:  # fmt: skip
    """What the function returns in a process where torch sees this card, under the name `cuda`.

    Args:
        modules: what a new process imports before the call; by default the function's own.
        time_limit: in seconds; a process that takes longer is ended.

    Raises:
        WorkbenchError: as raised there, or because the emulator is not set up, or the time was up.
        RuntimeError: another failure there.
    """
    with _lock:
        worker = _living(gpu, modules or (str(function.__module__),))
        try:
            return cast("R", worker.call(function, *args, time_limit=time_limit, **kwargs))
        except WorkbenchError:
            raise
        except BaseException:
            end_processes(gpu.name)  # an answer may still come: the next call must not get it
            raise


def start_process(gpu: Gpu, modules: Sequence[str]) -> None:
    """Start the card's process if there is none: it loads its libraries while the caller does something else."""
    with _lock:
        _living(gpu, modules)


def _living(gpu: Gpu, modules: Sequence[str]) -> Worker:
    """The card's process. Each takes half a gigabyte of the host's memory, so the oldest goes when they are many."""
    if gpu.name not in _workers or not _workers[gpu.name].alive():
        told, name = environment(gpu), f"process with the emulated {gpu.title}"
        end_processes(gpu.name)
        if len(_workers) >= MOST_PROCESSES:
            end_processes(next(iter(_workers)))
        _workers[gpu.name] = Worker(told, modules, place.python_path(), name)
    return _workers[gpu.name]


def end_processes(name: str | None = None) -> None:
    """End the processes of one card, or all of them."""
    for one in [one for one in _workers if name in (None, one)]:
        _workers.pop(one).close()


atexit.register(end_processes)


def also_on_emulated_devices(function: Callable[P, R]) -> Callable[P, R]:
    """Of a function with the keyword `device`: `device="emulated:t4"` calls it on that card, as `device="cuda"`."""

    @wraps(function)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        card = emulated_card(str(kwargs.get("device") or ""))
        if card is None:
            return function(*args, **kwargs)
        told: dict[str, Any] = {**kwargs, "device": "cuda"}
        return call_on(card, dispatched, *args, **told)

    return dispatched
