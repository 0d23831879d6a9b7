"""The program's steps, and the containers and variables that hold more from one to the next."""

from __future__ import annotations

import gc
import importlib
import sys
import time
import traceback
from collections import deque
from typing import Any

from _emulated_history import (  # type: ignore[import-not-found]  # beside this file
    LEAST_GROWTH,
    LEAST_STEPS,
    LIBRARY,
    changes,
)

STEPS: list[int] = []  # the microseconds at which steps of an optimizer ended
# The microseconds at which a DataLoader was asked for its next batch, for programs without an optimizer.
BATCHES: list[int] = []
HOLDERS: dict[str, None] = {}  # descriptions of what holds the growth, in the order in which they were found
_ALLOCATED: deque[int] = deque(maxlen=LEAST_STEPS)  # bytes at the last steps
_LENGTHS: dict[int, int] = {}  # the length of each container at the step before, by its id
MOST_SEARCHES = 6  # a search takes as long as a garbage collection
_searches = 0


def marks() -> list[int]:
    """Return the ends of the steps, or of the batches where no optimizer steps, in microseconds; without the first two,
    which allocate the optimizer's states."""
    return (STEPS if len(STEPS) > LEAST_STEPS else BATCHES)[2:]


def note_steps(torch: Any) -> None:
    """Hook PyTorch's optimizers and DataLoaders, so that steps and batches are noted."""
    loader = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    optimizers = importlib.import_module("torch.optim.optimizer")
    next_of_loader = loader.__next__

    def next_batch(self: Any) -> Any:
        BATCHES.append(time.time_ns() // 1000)
        if not STEPS:
            _search_if_it_grows(torch)
        return next_of_loader(self)

    def note_step(*_: Any) -> None:
        STEPS.append(time.time_ns() // 1000)
        _search_if_it_grows(torch)

    loader.__next__ = next_batch
    optimizers.register_optimizer_step_post_hook(note_step)


def _search_if_it_grows(torch: Any) -> None:
    """Search for what holds the growth, if every one of the last steps left more bytes. The next step searches again,
    since a container that holds the growth is longer then."""
    global _searches
    if not torch.cuda.is_initialized():
        return
    _ALLOCATED.append(torch.cuda.memory_allocated())
    grows = len(_ALLOCATED) == LEAST_STEPS and min(changes(list(_ALLOCATED))) >= LEAST_GROWTH
    if not grows or _searches == MOST_SEARCHES or HOLDERS:
        return
    _searches += 1
    for container in _containers(torch):
        if len(container) > _LENGTHS.get(id(container), len(container)):
            HOLDERS.setdefault(_name_of(container))
        _LENGTHS[id(container)] = len(container)
    if _searches > 1:
        HOLDERS.update(dict.fromkeys(_sums_with_their_graph(torch)))


def _containers(torch: Any) -> list[Any]:
    """Return the lists, dicts and deques of several entries whose last entry holds a tensor of the card."""
    containers = []
    for thing in gc.get_objects():
        if type(thing) in (list, dict, deque) and len(thing) >= LEAST_STEPS - 1:
            last = next(reversed(thing.values()), None) if type(thing) is dict else thing[-1]
            if _holds_tensor(torch, last):
                containers.append(thing)
    return containers


def _holds_tensor(torch: Any, thing: Any) -> bool:
    if isinstance(thing, dict):
        thing = list(thing.values())
    if not isinstance(thing, (list, tuple)):
        thing = [thing]
    return any(isinstance(entry, torch.Tensor) and entry.is_cuda for entry in thing)


def _name_of(container: Any) -> str:
    container_type = type(container).__name__
    variables = _variables()
    for name, value in variables:
        if value is container:
            return f"the {container_type} `{name}`"
    for name, value in variables:
        for attribute, inner in list(getattr(value, "__dict__", {}).items()):
            if inner is container:
                return f"the {container_type} `{name}.{attribute}`"
    return f"a {container_type} of {len(container)} entries"


def _variables() -> list[tuple[str, Any]]:
    """Return the variables of the program's own functions that run now, the innermost first, and of their modules, as
    (name, value)."""
    variables: list[tuple[str, Any]] = []
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if not LIBRARY.search(frame.f_code.co_filename):
            variables += [*frame.f_locals.items(), *frame.f_globals.items()]
    return variables


def _sums_with_their_graph(torch: Any) -> list[str]:
    """Describe the variables such as `total` of `total += loss`: each keeps the graphs of all losses, unless it adds
    `loss.item()`."""
    names = []
    for name, value in _variables():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and _additions(value.grad_fn) >= LEAST_STEPS - 1:
            names.append(f"the sum `{name}`, which keeps the graph of each loss")
    return names


def _additions(node: Any) -> int:
    """Count the additions that stand in a row in an autograd graph, up to LEAST_STEPS."""
    count = 0
    while node is not None and node.name() == "AddBackward0" and count < LEAST_STEPS:
        count += 1
        node = next((inner for inner, _ in node.next_functions if inner and inner.name() == "AddBackward0"), None)
    return count
