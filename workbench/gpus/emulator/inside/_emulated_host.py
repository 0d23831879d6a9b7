"""First values that nobody reads: a model that is built on the host takes no real memory for them.

A program draws the weights of its model on the host, and copies them to the card, which computes nothing here. Of a
large tensor they are zeros, whose pages Linux gives only to who writes them: 27 GB then take no memory, and no time.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

LARGE = 16 * 2**20  # bytes: smaller ones are drawn, as a program may look at them
DONTNEED = 4  # of Linux's madvise: these pages read zero from now on
libc = ctypes.CDLL(None)


def draw_no_large_tensors(torch: Any) -> None:
    """From now on, a large tensor of the host is filled with zeros where PyTorch would draw random numbers."""
    draws = [(torch.Tensor, "normal_"), (torch.Tensor, "uniform_")]
    # these compute with what they drew
    draws += [(torch.nn.init, "trunc_normal_"), (torch.nn.init, "orthogonal_")]
    for owner, name in draws:
        setattr(owner, name, _undrawn_if_large(torch, getattr(owner, name)))


def _undrawn_if_large(torch: Any, draw: Any) -> Any:
    plain = (torch.Tensor, torch.nn.Parameter)  # others, as fake ones, may have no memory

    @functools.wraps(draw)
    def drawn(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        is_large = type(tensor) in plain and tensor.device.type == "cpu" and tensor.nbytes >= LARGE
        if not is_large or not tensor.is_contiguous():
            return draw(tensor, *args, **kwargs)
        _zero(tensor.data_ptr(), tensor.nbytes)
        return tensor

    return drawn


def _zero(address: int, size: int) -> None:
    end = address + size
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = end // mmap.PAGESIZE * mmap.PAGESIZE
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONTNEED)
    ctypes.memset(address, 0, first - address)
    ctypes.memset(last, 0, end - last)
