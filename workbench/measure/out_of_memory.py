"""What PyTorch's own out-of-memory messages say, as numbers.

The wording is that of `c10/cuda/CUDACachingAllocator.cpp` ("Tried to allocate … Of the allocated memory … is allocated
by PyTorch, … and … is reserved by PyTorch but unallocated") and, for the CPU, of `c10/core/impl/alloc_cpu.cpp`. CUDA
rounds to two digits, and so do these numbers. What a message does not say is None.
"""

import re
from dataclasses import dataclass

from workbench.base.categories import UNITS

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Refusal:
    """A request that was refused, and what PyTorch's allocator had at that moment, all in bytes."""

    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


def read(message: str) -> Refusal:
    """The numbers of an out-of-memory message; none of them if it is worded otherwise."""
    requested = _size(rf"[Tt]ried to allocate {_SIZE}", message)
    allocated = _size(rf"{_SIZE} is allocated by PyTorch", message)
    unallocated = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", message)
    if allocated is None or unallocated is None:
        return Refusal(requested, allocated)
    return Refusal(requested, allocated, allocated + unallocated)


def _size(pattern: str, message: str) -> int | None:
    match = re.search(pattern, message)
    return int(float(match[1]) * UNITS[match[2]]) if match else None
