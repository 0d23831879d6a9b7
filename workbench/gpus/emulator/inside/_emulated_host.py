"""Models on the host without real memory: nobody reads their first values, so that these need not be drawn.

A program draws the weights of its model on the host, and copies them to the card, which computes nothing here. A large
tensor gets zeros instead: Linux gives such a page memory only when it is written to. 27 GB then take no memory and no
time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

LARGE = 16 * 2**20  # bytes: smaller tensors are drawn, since a program may look at them
DONTNEED = 4  # the advice of Linux's madvise after which pages have no memory, and read zero
libc = ctypes.CDLL(None)


def draw_no_large_tensors(torch: Any) -> None:
    """Replace PyTorch's functions that draw random numbers, so that a large tensor of the host gets zeros."""
    draws = [(torch.Tensor, "normal_"), (torch.Tensor, "uniform_")]
    # These two compute with the numbers that they draw, which would write to all pages.
    draws += [(torch.nn.init, "trunc_normal_"), (torch.nn.init, "orthogonal_")]
    for owner, name in draws:
        setattr(owner, name, _draw_small_tensors(torch, getattr(owner, name)))


def _draw_small_tensors(torch: Any, draw: Any) -> Any:
    plain = (torch.Tensor, torch.nn.Parameter)  # other classes, such as fake tensors, may have no memory

    @functools.wraps(draw)
    def draw_or_zero(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_large = type(tensor) in plain and tensor.device.type == "cpu" and tensor.nbytes >= LARGE
        if not is_large or not tensor.is_contiguous():
            return draw(tensor, *args, **kwargs)
        _zero(tensor.data_ptr(), tensor.nbytes)
        return tensor

    return draw_or_zero


def _zero(address: int, size: int) -> None:
    """Fill memory with zeros: whole pages are given back to Linux, and the ends are written."""
    end = address + size
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, end - last)
