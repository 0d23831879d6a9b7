"""Calling a function on an emulated GPU: in a child process, one for each card, kept for the next call."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

from workbench.base.launch import Child, Fork, Kept
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import emulated_card
from workbench.gpus.emulator.launch import INSIDE, environment

P = ParamSpec("P")
R = TypeVar("R")

TRUNK = Kept()  # the one process that imports the libraries, and looks at no card
# forks of it, by the card's name; each takes a few hundred megabytes of the host's memory
PROCESSES = Kept(at_most=4)


def call_on(gpu: Gpu, function: Callable[..., R], *args: Any, modules: Sequence[str] = (), **kwargs: Any) -> R:
    """What the function returns in a process where torch sees this card, under the name `cuda`.

    Args:
        modules: what the first process of all imports before the call; by default the function's own.
        kwargs: the function's, and `time_limit` in seconds: a process that takes longer is ended.

    Raises:
        WorkbenchError: as raised there, or because the emulator is not set up, or the time was up.
        RuntimeError: another failure there.
    """
    started = partial(_started, gpu, modules or (str(function.__module__),))
    with PROCESSES.lock:
        try:
            return cast("R", PROCESSES.call(gpu.name, started, function, *args, **kwargs))
        finally:
            _end_if_used_up(gpu.name)


def _end_if_used_up(name: str) -> None:
    """A process where tensors are left, as bitsandbytes keeps tables on the card, is not used again: they, and the
    allocator's blocks around them, would change what the next call needs."""
    child = PROCESSES.children.get(name)
    if child is not None and child.alive() and child.call(tensors_are_left):
        PROCESSES.end(name)


def tensors_are_left() -> bool:
    import torch

    return torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0


def start_process(gpu: Gpu, modules: Sequence[str]) -> None:
    """Start what the card's process will be a fork of: it loads its libraries while the caller does something else."""
    # this asks no driver
    variables = {**environment(gpu), "EMULATED_TRUNK": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    path = [str(INSIDE), *place.python_path()]
    TRUNK.start("trunk", partial(Child, variables, modules, path, name="emulator's process"))


def _started(gpu: Gpu, modules: Sequence[str]) -> Child:
    start_process(gpu, modules)
    variables = environment(gpu)
    name = f"process with the emulated {gpu.title}"
    return fork_of_trunk(variables, name) or Child(variables, modules, place.python_path(), name=name)


def fork_of_trunk(environment: Mapping[str, str], name: str) -> Child | None:
    """A child that has the libraries already; None if no process has."""
    trunk = TRUNK.children.get("trunk")
    with TRUNK.lock:
        if trunk and trunk.alive():
            return Fork(trunk, environment, name)
    return None


def also_on_emulated_devices(function: Callable[P, R]) -> Callable[P, R]:
    """Of a function with the keyword `device`: `device="emulated:t4"` calls it on that card, as `device="cuda"`."""

    @wraps(function)
    def dispatched(*args: P.args, **kwargs: P.kwargs) -> R:
        card = emulated_card(str(kwargs.get("device") or ""))
        if card is None:
            return function(*args, **kwargs)
        on_card: dict[str, Any] = {**kwargs, "device": "cuda"}
        return call_on(card, dispatched, *args, **on_card)

    return dispatched
