"""A trace through the model of a GPU's caching allocator."""

from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.base.categories import Category, Phase
from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import Gpu
from workbench.prediction.shadow.trace import Column, Trace


def replay(trace: Trace, gpu: Gpu | None) -> dict[str, Any]:
    """Put every allocation and free through the allocator, in order; the fields of a `Prediction` that this gives.

    Bytes are those of blocks, as the allocator counts them. `peak_operation` made the youngest large tensor that is
    alive at the peak. What no tensor accounts for (workspaces, scratch, rounding) is `unattributed`, as it is when a
    GPU is measured.

    Where memory gets short, the allocator gives cached segments back, as PyTorch's does. If that is not enough, the
    numbers are those of a GPU that has enough.

    Args:
        gpu: whose memory, workspaces and rules; None counts bytes alone, as a CPU does.
    """
    sizes = trace.sizes(gpu)
    if gpu is None:
        return _read(trace, sizes, trace.timeline(sizes).total)
    room = gpu.memory_bytes - gpu.context_bytes_estimate
    with_enough = _of_enough(trace, sizes.tobytes())
    if with_enough["peak_reserved_bytes"] > room:
        with suppress(OutOfCapacity):
            return _allocated(trace, sizes, capacity_bytes=room, device_bytes=gpu.memory_bytes)
    return with_enough


@lru_cache(maxsize=8)
def _of_enough(trace: Trace, sizes: bytes) -> dict[str, Any]:
    """The same for all GPUs that have enough and on which the storages have these sizes, an int64 each."""
    return _allocated(trace, np.frombuffer(sizes, dtype=np.int64))


def _allocated(trace: Trace, sizes: Column, **limits: Any) -> dict[str, Any]:
    allocator = CachingAllocator(**limits, **trace.allocator)
    moves = np.empty(trace.events, dtype=np.int64)
    ended = np.flatnonzero(trace.died >= 0)
    moves[trace.born] = np.arange(len(sizes))
    moves[trace.died[ended]] = ~ended  # the complement, which is negative, of what goes
    handles = [0] * len(sizes)
    requests = sizes.tolist()
    allocated = np.empty(trace.events, dtype=np.int64)
    for event, move in enumerate(moves.tolist()):
        if move >= 0:
            handles[move] = allocator.malloc(requests[move])
        else:
            allocator.free(handles[~move])
        allocated[event] = allocator.allocated_bytes
    return _read(trace, sizes, allocated, allocator.peak_reserved_bytes)


def _read(trace: Trace, sizes: Column, allocated: Column, reserved: int | None = None) -> dict[str, Any]:
    """From allocated bytes after every event, and the most that was reserved."""
    timeline = trace.timeline(sizes)
    phases = np.array(timeline.phases, dtype=object)
    by_phase = {}
    for phase in Phase:
        inside = phases == phase
        if inside.any():
            by_phase[phase] = int(allocated[inside].max())
    peak_phase = max(by_phase, key=by_phase.__getitem__)
    event = int(np.where(phases == peak_phase, allocated, -1).argmax())
    by_category = timeline.by_category(event)
    by_category[Category.UNATTRIBUTED] += int(allocated[event]) - sum(by_category.values())
    maximum = timeline.maximum_by_category()
    maximum[Category.UNATTRIBUTED] = int((allocated - timeline.total + timeline.live[-1]).max())
    return {
        "peak_allocated_bytes": int(allocated[event]),
        "peak_reserved_bytes": reserved,
        "peak_phase": peak_phase,
        "peak_operation": maker_at(trace, sizes, event),
        "by_category": by_category,
        "maximum_by_category": maximum,
        "by_phase": by_phase,
        "workspace_bytes": int(sizes[list(trace.workspaces)].sum()),
        "timeline": timeline,
    }


def maker_at(trace: Trace, sizes: Column, event: int) -> str:
    """Who made the youngest allocation that matters: of those alive at the peak, one of at least a hundredth of it."""
    alive = (trace.born <= event) & ((trace.died < 0) | (trace.died > event))
    large = alive & (sizes >= sizes[alive].sum() // 100)
    chosen = np.flatnonzero(large)
    if not len(chosen):
        chosen = np.flatnonzero(alive)
    return trace.operations[int(trace.maker[chosen[trace.born[chosen].argmax()]])]
