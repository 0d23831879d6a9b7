"""What each kind of device can say about its own memory, behind one small interface.

CUDA keeps exact peaks (`torch.cuda.max_memory_allocated`, PyTorch's "Memory management" notes). Apple's MPS only says
how much is in use now: the meter takes the larger of those readings, made at phase boundaries, and of the tracker's
peak, a lower bound. The CPU has no allocator statistics at all: there the tracker alone measures.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from workbench.measure.emulated import emulated
from workbench.measure.garbage import collect_garbage


class DeviceAllocator:
    """Byte counters of one device. As they stand here, those of the CPU, which has no counters: in use is the sum of
    the living tensors that Python can reach.

    Attributes:
        source: the name that a record gives to these numbers.
        enforces_caps: PyTorch's allocator keeps to a memory cap by itself; else the tracker must.
    """

    source = "cpu-tracker"
    enforces_caps = False

    def prepare(self) -> None:
        """Free what nobody uses any more, and begin new peaks."""
        collect_garbage()

    def in_use(self) -> int:
        return live_tensor_bytes("cpu")

    def take_peaks(self) -> tuple[int, int | None]:
        """(allocated, reserved) peaks since the last call, in bytes; reserved is None where there is no such number."""
        return 0, None


class CudaAllocator(DeviceAllocator):
    enforces_caps = True

    @property
    def source(self) -> str:  # type: ignore[override]
        return f"emulated:{emulated()}" if emulated() else "cuda-allocator"

    def prepare(self) -> None:
        collect_garbage()
        torch._C._cuda_clearCublasWorkspaces()  # else the first run of a process alone would count them in its peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def in_use(self) -> int:
        return torch.cuda.memory_allocated()

    def take_peaks(self) -> tuple[int, int | None]:
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return peaks


class MpsAllocator(DeviceAllocator):
    source = "mps-allocator+tracker"  # PyTorch can set a limit there, but not say what it was before: enforces no caps

    def prepare(self) -> None:
        collect_garbage()
        torch.mps.empty_cache()

    def in_use(self) -> int:
        return torch.mps.current_allocated_memory()

    def take_peaks(self) -> tuple[int, int | None]:
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()


def allocator_for(device: torch.device) -> DeviceAllocator:
    return {"cuda": CudaAllocator, "mps": MpsAllocator}.get(device.type, DeviceAllocator)()


def storage_bytes(things: Iterable[Any], device_type: str) -> int:
    """Bytes of the distinct storages on a device type that the tensors among these things have."""
    sizes: dict[int, int] = {}
    for thing in things:
        # by `type`, because `isinstance` would make lazy objects load what they stand for
        for part in parts(thing) if issubclass(type(thing), torch.Tensor) else ():
            if part.device.type == device_type and part.layout is torch.strided:
                storage = part.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def parts(thing: Any) -> list[Any]:
    """The tensors that a thing is made of. Of quantized states the class looks like a tensor, or holds some."""
    if is_traceable_wrapper_subclass(thing):
        return [part for name in thing.__tensor_flatten__()[0] for part in parts(getattr(thing, name))]
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [held for held in getattr(thing, "__dict__", {}).values() if isinstance(held, torch.Tensor)]


def live_tensor_bytes(device_type: str) -> int:
    """Bytes of all distinct tensor storages on a device type that the garbage collector knows of."""
    return storage_bytes(gc.get_objects(), device_type)


def total_bytes(device: torch.device) -> int | None:
    """The memory of a GPU, as CUDA reports it; None where memory is shared with everything else."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


@contextmanager
def capped(device: torch.device, cap_bytes: int | None) -> Iterator[None]:
    """Let PyTorch's own allocator refuse to reserve more than `cap_bytes`, where it can: on CUDA.

    The cap counts what is reserved, with the blocks that are cached, and not the CUDA context. The fraction that was
    set before comes back afterwards.
    """
    total = total_bytes(device)
    if cap_bytes is None or total is None:
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index  # the fractions are kept by index
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / total, 1.0), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
