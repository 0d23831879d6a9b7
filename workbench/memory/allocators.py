"""What each kind of device can say about its own memory, behind one small interface.

CUDA keeps exact peaks (`torch.cuda.max_memory_allocated`, PyTorch's "Memory management" notes). Apple's MPS only says
how much is in use now: the meter takes the larger of those readings, made at phase boundaries, and of the tracker's
peak, a lower bound. The CPU has no allocator statistics at all: there the tracker alone measures.
"""

import gc
from typing import Protocol

import torch


class Allocator(Protocol):
    """Byte counters of one device."""

    source: str

    def prepare(self) -> None: ...
    def in_use(self) -> int: ...
    def take_peaks(self) -> tuple[int, int | None]:
        """(allocated, reserved) peaks since the last call, in bytes; reserved is None where there is no such number."""


class CudaAllocator:
    source = "cuda-allocator"

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

    def prepare(self) -> None:
        gc.collect()

    def in_use(self) -> int:
        return live_tensor_bytes("cpu")

    def take_peaks(self) -> tuple[int, int | None]:
        return 0, None


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of all distinct tensor storages on a device type that the garbage collector knows of."""
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device_type and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def allocator_for(device: torch.device) -> Allocator:
    kinds: dict[str, type[Allocator]] = {"cuda": CudaAllocator, "mps": MpsAllocator}
    return kinds.get(device.type, CpuTensors)()
