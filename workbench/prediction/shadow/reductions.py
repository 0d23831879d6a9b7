"""Scratch that depends on the GPU: what blocks of threads take to share one result, in sums and in attention.

`setReduceConfig` of PyTorch's `aten/src/ATen/native/cuda/Reduce.cuh` decides by the shape and by the GPU whether the
inputs of one output are divided among several blocks, which then meet in global memory (`global_memory_size`), with one
semaphore for each column of blocks. The names are those of that file.
"""

import math
from dataclasses import dataclass

import torch

from workbench.gpus.catalogue import Gpu

MAX_THREADS = 512
WARP = 32
VECTOR = 4  # vt0: values that a thread loads at once
MIN_VALUES = 16  # of a thread
MAX_VALUES = 256
ACCUMULATOR_BYTES = 4
SEMAPHORE_BYTES = 4

Dimension = tuple[int, int]  # size, stride in elements


@dataclass(frozen=True)
class Reduction:
    """A reduction of floating-point numbers, as `TensorIterator` lays it out.

    Args:
        reduced: the dimensions that go, the fastest first, neighbours in memory joined.
        kept: the others, likewise.
    """

    reduced: tuple[Dimension, ...]
    kept: tuple[Dimension, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, dims: tuple[int, ...]) -> "Reduction":
        """Over `dims`; over all if there are none. Those that stay are in the order of the result, which is dense."""
        gone = {dim % tensor.ndim for dim in dims} or set(range(tensor.ndim))
        sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
        reduced = sorted((sizes[dim] for dim in gone), key=lambda dimension: dimension[1])
        kept = [sizes[dim] for dim in reversed(range(tensor.ndim)) if dim not in gone]
        return cls(_joined(reduced), _joined(kept))

    def bytes_on(self, gpu: Gpu) -> tuple[int, int]:
        """The buffer and the semaphores; zeros where each output has a block of its own."""
        outputs = math.prod(size for size, _ in self.kept)
        inputs = math.prod(size for size, _ in self.reduced)
        if not outputs or not inputs:
            return 0, 0
        stride = self.reduced[0][1] if self.reduced else 1
        kept_stride = self.kept[0][1] if self.kept else 0
        along = not self.kept or stride < kept_stride  # the fastest dimension is one that goes
        vector = 1
        if along:
            width = inputs
            height = outputs
            if stride == 1 and inputs >= 128 and len(self.reduced) == 1:
                width //= VECTOR
        else:
            width = outputs
            height = inputs
            if kept_stride == 1:
                vector = self._output_vector()
                width //= vector
        width, height = _block(width, height, MAX_THREADS // vector)
        together = width if along else 1  # threads of a row, on one output
        beside = 1 if along else width  # outputs of a row
        values = _ceil(inputs, together)
        if values < min(height * 16, MAX_VALUES):
            return 0, 0  # no warps share an output, so no blocks do
        values = _ceil(inputs, together * height)
        columns = _ceil(outputs // vector, beside)
        wanted: int = gpu.multiprocessors * (gpu.multiprocessor.threads // (width * height))
        if values < MAX_VALUES or columns > wanted:
            return 0, 0
        blocks = max(min(_ceil(wanted, columns), _ceil(values, MIN_VALUES)), _ceil(values, MAX_VALUES))
        if blocks == 1:
            return 0, 0
        return ACCUMULATOR_BYTES * outputs * blocks * beside * vector, SEMAPHORE_BYTES * columns

    def _output_vector(self) -> int:
        """`get_output_vec_size`: the largest power of two up to 4 that divides the row and all other strides."""
        numbers = [self.kept[0][0], *(stride for _, stride in (*self.reduced, *self.kept[1:]))]
        for size in (4, 2):
            if all(number % size == 0 for number in numbers):
                return size
        return 1


@dataclass(frozen=True)
class Splits:
    """The forward pass of flash attention without dropout, keys and values divided where queries alone leave
    multiprocessors idle: `set_params_splitkv` and `num_splits_heuristic` in `flash_attn/flash_api.cpp`.

    Args:
        rows: batch size times heads.
        queries, keys: their number.
        width: of a head.
    """

    rows: int
    queries: int
    keys: int
    width: int

    def bytes_on(self, gpu: Gpu) -> tuple[int, int]:
        """A log-sum-exp and an output, in fp32, for each split; zeros where there is one."""
        splits = self._splits(2 * gpu.multiprocessors)
        if splits == 1:
            return 0, 0
        sums_bytes = splits * self.rows * self.queries * ACCUMULATOR_BYTES
        return sums_bytes, sums_bytes * _ceil(self.width, 32) * 32

    def _splits(self, at_once: int) -> int:
        """The fewest that fill the card nearly as well as any number does."""
        blocks = self.rows * _ceil(self.queries, 64)
        if blocks >= 0.8 * at_once:
            return 1
        keys_at_once = 64
        if self.width <= 64:
            keys_at_once = 256
        elif self.width <= 128:
            keys_at_once = 128
        pieces = _ceil(self.keys, keys_at_once)
        filled = {}
        for splits in range(1, min(128, at_once, pieces) + 1):
            if splits == 1 or _ceil(pieces, splits) != _ceil(pieces, splits - 1):  # more would be empty
                filled[splits] = blocks * splits / at_once / _ceil(blocks * splits, at_once)
        enough = 0.85 * max(filled.values())
        return min(splits for splits, share in filled.items() if share >= enough)


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _joined(dimensions: list[Dimension]) -> tuple[Dimension, ...]:
    """Dimensions that follow each other in memory are one; those of size 1 are none."""
    joined: list[Dimension] = []
    for size, stride in dimensions:
        if size == 1:
            continue
        if joined and math.prod(joined[-1]) == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, stride))
    return tuple(joined)


def _block(width: int, height: int, threads: int) -> tuple[int, int]:
    """`set_block_dimension`: powers of two that make at most so many threads."""
    columns, rows = (1 << max(min(number, threads), 1).bit_length() - 1 for number in (width, height))
    block_width = min(columns, WARP)
    block_height = min(rows, threads // block_width)
    return min(columns, threads // block_height), block_height
