"""The scratch of reductions, which depends on the GPU: blocks of threads sum the rows of a wide matrix, as for a bias.

`setReduceConfig` of PyTorch's `aten/src/ATen/native/cuda/Reduce.cuh` decides by the shape and by the GPU whether the
inputs of one output are divided among several blocks, which then meet in global memory (`global_memory_size`), with one
semaphore for each column of blocks. Other reductions take less than half a megabyte, and are left out.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from workbench.gpus.catalogue import Gpu

WARP = 32  # threads that lie beside each other in a block
VECTOR = 4  # outputs of one thread, where their number can be divided by it
MIN_VALUES = 16  # inputs that a thread reduces, at least
MAX_VALUES = 256  # inputs that a thread reduces, at most
ACCUMULATOR_BYTES = 4
SEMAPHORE_BYTES = 4

aten: Any = torch.ops.aten
# Operations that reduce, each with the position of its dimensions among the arguments.
REDUCING = {aten.sum: 1, aten.mean: 1, aten.linalg_vector_norm: 2}


@dataclass(frozen=True)
class Reduction:
    """A reduction of floating-point numbers: `inputs` numbers become one, for each of `outputs` that are neighbours."""

    inputs: int
    outputs: int

    def bytes_on(self, gpu: Gpu) -> tuple[int, int]:
        """Return the bytes of the buffer and of the semaphores: zeros where each output has a block of its own."""
        vector = math.gcd(self.outputs, VECTOR)
        height = 16 // vector  # rows of threads in a block
        values = -(-self.inputs // height)  # inputs of a thread
        beside = WARP * vector  # outputs of a block
        columns = -(-self.outputs // beside)
        wanted: int = gpu.multiprocessors * (gpu.multiprocessor.threads // (WARP * height))
        if values < MAX_VALUES or columns > wanted:
            return 0, 0
        blocks = max(min(-(-wanted // columns), -(-values // MIN_VALUES)), -(-values // MAX_VALUES))
        if blocks == 1:
            return 0, 0
        return ACCUMULATOR_BYTES * self.outputs * blocks * beside, SEMAPHORE_BYTES * columns


def reduction_of(operation: Any, args: tuple[Any, ...]) -> Reduction | None:
    """Return an operation of the dispatcher as a reduction.

    None means that it reduces no floating-point numbers, or numbers that are neighbours in memory, or that it has fewer
    outputs than a block has beside each other.
    """
    place = REDUCING.get(getattr(operation, "overloadpacket", None))
    if place is None or not args[0].is_floating_point():
        return None
    tensor = args[0]
    dims = args[place] if len(args) > place else None
    if isinstance(dims, int):
        dims = (dims,)
    gone = {dim % tensor.ndim for dim in dims or range(tensor.ndim)}
    outputs = 1
    strides = {}
    for dim, size in enumerate(tensor.shape):
        if dim not in gone:
            outputs *= size
        if size > 1:
            strides[dim] = tensor.stride(dim)
    if outputs < WARP * VECTOR or min(strides, key=strides.__getitem__) in gone:
        return None
    return Reduction(tensor.numel() // outputs, outputs)
