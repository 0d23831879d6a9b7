"""Counters of a device's memory, behind one small interface for all kinds of device.

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

from workbench.base.device import current_emulated_gpu
from workbench.base.garbage import collect_garbage


class DeviceAllocator:
    """Byte counters of one device. This base class is the CPU's, which has no counters: its bytes in use are those of
    the living tensors that Python can reach.

    Attributes:
        source: the name that a record gives to these numbers.
        enforces_caps: whether PyTorch's allocator keeps to a memory cap by itself; if not, the tracker must.
    """

    source = "cpu-tracker"
    enforces_caps = False

    def prepare(self) -> None:
        """Free what nobody uses any more, and begin new peaks."""
        collect_garbage()

    def in_use(self) -> int:
        """Return the bytes in use now."""
        return live_tensor_bytes("cpu")

    def take_peaks(self) -> tuple[int, int | None]:
        """Return the (allocated, reserved) peaks since the last call, in bytes, and begin new ones. Reserved is None
        where there is no such number."""
        return 0, None


class CudaAllocator(DeviceAllocator):
    """PyTorch's caching allocator, on a GPU or an emulated one."""

    enforces_caps = True

    @property
    def source(self) -> str:  # type: ignore[override]
        if current_emulated_gpu():
            return f"emulated:{current_emulated_gpu()}"
        return "cuda-allocator"

    def prepare(self) -> None:
        collect_garbage()
        # cuBLAS keeps workspaces for the whole process: only its first run would count them in the peak.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def in_use(self) -> int:
        return torch.cuda.memory_allocated()

    def take_peaks(self) -> tuple[int, int | None]:
        allocated = torch.cuda.max_memory_allocated()
        reserved = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return allocated, reserved


class MpsAllocator(DeviceAllocator):
    """The allocator of Apple's MPS. It enforces no caps: PyTorch can set a limit, but not say what it was before."""

    source = "mps-allocator+tracker"

    def prepare(self) -> None:
        collect_garbage()
        torch.mps.empty_cache()

    def in_use(self) -> int:
        return torch.mps.current_allocated_memory()

    def take_peaks(self) -> tuple[int, int | None]:
        return torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()


def allocator_for(device: torch.device) -> DeviceAllocator:
    if device.type == "cuda":
        return CudaAllocator()
    if device.type == "mps":
        return MpsAllocator()
    return DeviceAllocator()


def storage_bytes(things: Iterable[Any], device_type: str) -> int:
    """Return the bytes that the tensors among these things take on a device type. Each storage counts once."""
    sizes: dict[int, int] = {}
    for thing in things:
        # `isinstance` would make lazy objects load what they stand for.
        if not issubclass(type(thing), torch.Tensor):
            continue
        for tensor in parts(thing):
            if tensor.device.type == device_type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def parts(thing: Any) -> list[Any]:
    """Return the plain tensors that a thing is made of: itself, those it wraps, or those in its attributes.

    Quantized states of optimizers are wrappers (torchao) or hold tensors (bitsandbytes).
    """
    if is_traceable_wrapper_subclass(thing):
        names, _ = thing.__tensor_flatten__()
        inner = []
        for name in names:
            inner += parts(getattr(thing, name))
        return inner
    if isinstance(thing, torch.Tensor):
        return [thing]
    return list(filter(torch.is_tensor, getattr(thing, "__dict__", {}).values()))


def live_tensor_bytes(device_type: str) -> int:
    """Return the bytes of all distinct tensor storages on a device type that the garbage collector knows of."""
    return storage_bytes(gc.get_objects(), device_type)


@contextmanager
def cap_memory(device: torch.device, cap_bytes: int | None) -> Iterator[None]:
    """Let PyTorch's own allocator refuse to reserve more than `cap_bytes`, where it can: on CUDA.

    The cap counts what is reserved, with the blocks that are cached, and not the CUDA context. The fraction that was
    set before comes back afterwards.
    """
    if cap_bytes is None or device.type != "cuda":
        yield
        return
    # PyTorch keeps the fractions by the device's index.
    index = torch.cuda.current_device() if device.index is None else device.index
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(min(cap_bytes / torch.cuda.mem_get_info(device)[1], 1.0), index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)
