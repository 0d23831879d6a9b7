"""The replay of a trace in the model of a GPU's caching allocator."""

from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from workbench.base.categories import Category, Phase
from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import Gpu
from workbench.prediction.shadow.trace import Column, Trace


def replay(trace: Trace, gpu: Gpu | None) -> dict[str, Any]:
    """Put every allocation and free of a trace through the allocator, in order.

    Where memory gets short, the allocator gives cached segments back, as PyTorch's does. If that is not enough, the
    numbers are those of a GPU that has enough.

    Args:
        gpu: the GPU whose memory, workspaces and rules hold; None counts bytes alone, as a CPU does.

    Returns:
        Fields of a `Prediction`. Bytes are those of blocks, as the allocator counts them. `peak_operation` made the
        youngest large tensor that is alive at the peak. What no tensor accounts for (workspaces, scratch, rounding) is
        `unattributed`, as it is when a GPU is measured.
    """
    sizes = trace.sizes(gpu)
    if gpu is None:
        return _read_peaks(trace, sizes, trace.timeline(sizes).total)
    room = gpu.memory_bytes - gpu.context_bytes_estimate
    with_enough = _allocate_freely(trace, sizes.tobytes())
    if with_enough["peak_reserved_bytes"] > room:
        with suppress(OutOfCapacity):
            return _allocate(trace, sizes, capacity_bytes=room, device_bytes=gpu.memory_bytes)
    return with_enough


@lru_cache(maxsize=8)
def _allocate_freely(trace: Trace, sizes: bytes) -> dict[str, Any]:
    """Replay a trace without a limit. The answer is kept, for all GPUs that have enough memory and these sizes.

    Args:
        sizes: of each storage an int64, as bytes, which can be a key.
    """
    return _allocate(trace, np.frombuffer(sizes, dtype=np.int64))


def _allocate(trace: Trace, sizes: Column, **limits: Any) -> dict[str, Any]:
    """Replay a trace under the limits of an allocator. Raises OutOfCapacity: they are too low."""
    allocator = CachingAllocator(**limits, **trace.allocator)
    moves = np.empty(trace.events, dtype=np.int64)
    ended = np.flatnonzero(trace.died >= 0)
    moves[trace.born] = np.arange(len(sizes))
    moves[trace.died[ended]] = ~ended  # a storage that is freed: the complement of its number, which is negative
    handles = [0] * len(sizes)
    requests = sizes.tolist()
    allocated = np.empty(trace.events, dtype=np.int64)
    for event, move in enumerate(moves.tolist()):
        if move >= 0:
            handles[move] = allocator.malloc(requests[move])
        else:
            allocator.free(handles[~move])
        allocated[event] = allocator.allocated_bytes
    return _read_peaks(trace, sizes, allocated, allocator.peak_reserved_bytes)


def _read_peaks(trace: Trace, sizes: Column, allocated: Column, reserved: int | None = None) -> dict[str, Any]:
    """Return the fields that `replay` returns.

    Args:
        sizes: bytes of every storage, (storages,).
        allocated: bytes in use after every event, (events,).
        reserved: the most bytes that were reserved; None without an allocator.
    """
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
    """Return the maker of the youngest large storage that is alive at an event.

    Large is a hundredth of all that is alive then.
    """
    alive = (trace.born <= event) & ((trace.died < 0) | (trace.died > event))
    large = alive & (sizes >= sizes[alive].sum() // 100)
    chosen = np.flatnonzero(large)
    if not len(chosen):
        chosen = np.flatnonzero(alive)
    return trace.operations[int(trace.maker[chosen[trace.born[chosen].argmax()]])]
