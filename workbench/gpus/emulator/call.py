"""Calls of a function on an emulated GPU: in a child process, one for each card, which stays for the next call."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, cast

from workbench.base.launch import Child, ChildPool, Fork
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.card import find_emulated_gpu
from workbench.gpus.emulator.launch import INSIDE, environment

P = ParamSpec("P")
R = TypeVar("R")

TRUNK = ChildPool()  # the one process that imports the libraries, and does not use the emulated GPU
# Forks of the trunk, by the card's name; each takes a few hundred megabytes of the host's memory.
PROCESSES = ChildPool(at_most=4)


def call_on(gpu: Gpu, function: Callable[..., R], *args: Any, modules: Sequence[str] = (), **kwargs: Any) -> R:
    """Return what the function returns in a process where torch sees this card, under the name `cuda`.

    Args:
        modules: the modules that the trunk imports before the first call; by default the function's own.
        kwargs: the function's, and `time_limit` in seconds: a process that takes longer is ended.

    Raises:
        WorkbenchError: the function raised it there; or the emulator is not set up, or the time was up.
        RuntimeError: another failure there.
    """
    make = partial(_start_child, gpu, modules or (str(function.__module__),))
    with PROCESSES.lock:
        try:
            return cast("R", PROCESSES.call(gpu.name, make, function, *args, **kwargs))
        finally:
            _end_if_used_up(gpu.name)


def _end_if_used_up(name: str) -> None:
    """End a process where tensors are left, as bitsandbytes keeps tables on the card: they, and the allocator's blocks
    around them, would change what the next call needs."""
    child = PROCESSES.children.get(name)
    if child is not None and child.is_alive() and child.call(tensors_are_left):
        PROCESSES.end(name)


def tensors_are_left() -> bool:
    """Whether this process still holds tensors on its card."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0


def start_trunk(gpu: Gpu, modules: Sequence[str]) -> None:
    """Start the trunk, of which a card's process is a fork: it loads its libraries while the caller does something
    else."""
    # The last variable makes PyTorch ask NVML whether there is a GPU: a process that has asked the driver cannot be
    # forked.
    variables = {**environment(gpu), "EMULATED_TRUNK": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    path = [str(INSIDE), *place.python_path()]
    TRUNK.start("trunk", partial(Child, variables, modules, path, name="emulator's process"))


def _start_child(gpu: Gpu, modules: Sequence[str]) -> Child:
    start_trunk(gpu, modules)
    variables = environment(gpu)
    name = f"process with the emulated {gpu.title}"
    return fork_of_trunk(variables, name) or Child(variables, modules, place.python_path(), name=name)


def fork_of_trunk(environment: Mapping[str, str], name: str) -> Child | None:
    """Return a child that has the libraries already; None if there is no trunk."""
    trunk = TRUNK.children.get("trunk")
    with TRUNK.lock:
        if trunk and trunk.is_alive():
            return Fork(trunk, environment, name)
    return None


def also_on_emulated_devices(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with the keyword `device` take `device="emulated:t4"`: it is then called in a process with that
    card, with `device="cuda"`."""

    @wraps(function)
    def dispatch(*args: P.args, **kwargs: P.kwargs) -> R:
        gpu = find_emulated_gpu(str(kwargs.get("device") or ""))
        if gpu is None:
            return function(*args, **kwargs)
        on_gpu: dict[str, Any] = {**kwargs, "device": "cuda"}
        # dill sends a function by its name, and that name means `dispatch` itself, which calls the function there.
        return call_on(gpu, dispatch, *args, **on_gpu)

    return dispatch
