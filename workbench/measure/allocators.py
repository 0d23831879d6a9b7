"""What each kind of device can say about its own memory, behind one small interface.

CUDA keeps exact peaks (`torch.cuda.max_memory_allocated`, PyTorch's "Memory management" notes). Apple's MPS only says
how much is in use now: the meter takes the larger of those readings, made at phase boundaries, and of the tracker's
peak, a lower bound. The CPU has no allocator statistics at all: there the tracker alone measures.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class DeviceAllocator(Protocol):
    """Byte counters of one device."""

    source: str
    enforces_caps: bool  # or else the tracker must

    def prepare(self) -> None: ...
    def in_use(self) -> int: ...
    def take_peaks(self) -> tuple[int, int | None]:
        """(allocated, reserved) peaks since the last call, in bytes; reserved is None where there is no such number."""


class CudaAllocator:
    source = "cuda-allocator"
    enforces_caps = True

    def prepare(self) -> None:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # else the first run of a process alone would count them in its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def in_use(self) -> int:
        return torch.cuda.memory_allocated()

    def take_peaks(self) -> tuple[int, int | None]:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return peaks


class MpsAllocator:
    source = "mps-allocator+tracker"
    enforces_caps = False  # PyTorch can set a limit there, but not say what it was before

    def prepare(self) -> None:
        gc.collect()
        torch.mps.empty_cache()

    def in_use(self) -> int:
        return torch.mps.current_allocated_memory()

    def take_peaks(self) -> tuple[int, int | None]:
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()


class CpuTensors:
    """No allocator to ask: what is in use is the sum of the living tensors that Python can reach."""

    source = "cpu-tracker"
    enforces_caps = False

    def prepare(self) -> None:
        gc.collect()

    def in_use(self) -> int:
        return live_tensor_bytes("cpu")

    def take_peaks(self) -> tuple[int, int | None]:
        return 0, None


@contextmanager
def collecting_only_what_is_new() -> Iterator[None]:
    """Garbage collections meanwhile leave out what lives now, unless the caller has frozen objects already.

    The libraries bring half a million objects, and the `Trainer` and accelerate collect several times in a run.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of all distinct tensor storages on a device type that the garbage collector knows of."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def total_bytes(device: torch.device) -> int | None:
    """The memory of a GPU, as CUDA reports it; None where memory is shared with everything else."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


@contextmanager
def capped(device: torch.device, cap_bytes: int | None) -> Iterator[None]:
    """Let PyTorch's own allocator refuse to reserve more than `cap_bytes`, where it can: on CUDA.

    The cap counts what is reserved, with the blocks that are cached, and not the CUDA context. The fraction that was
    set before comes back afterwards (1, where PyTorch is too old to say).
    """
    total = total_bytes(device)
    if cap_bytes is None or total is None:
        yield
        return
    before = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def allocator_for(device: torch.device) -> DeviceAllocator:
    kinds: dict[str, type[DeviceAllocator]] = {"cuda": CudaAllocator, "mps": MpsAllocator}
    return kinds.get(device.type, CpuTensors)()
