"""Memory that CUDA kernels and libraries take and PyTorch's dispatcher does not see.

No number is fitted; each is read from the source that allocates it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from workbench.prediction.shadow.reductions import Reduction, Splits

aten: Any = torch.ops.aten

# Each runs through cuBLAS, whose workspace belongs to a handle; every thread that multiplies has a handle of its own
# (`ATen/cuda/CublasHandlePool.cpp`), and cuBLASLt shares it. The workspace is never given back.
MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten._scaled_mm})

# Operations that are no views and still launch nothing.
NO_KERNEL = frozenset({aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty})

FP32_BYTES = INT32_BYTES = 4
# of attention, besides what it shares with flash attention; seen on an H100 (cuDNN 9.19), unpublished
CUDNN_WORKSPACE = 256
INT64_BYTES = 8

Block = int | Reduction | Splits  # bytes, or what the GPU makes of it, which is two blocks


@dataclass(frozen=True)
class Scratch:
    """What a kernel takes besides its results, and gives back, the last one first, when it returns.

    Args:
        before: taken before the results.
        after: taken after them. Groups that follow each other: each has gone before the next one comes.
    """

    before: tuple[int, ...] = ()
    after: tuple[tuple[Block, ...], ...] = ()


NO_SCRATCH = Scratch()


def scratch_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scratch:
    """For an operation of the dispatcher and its arguments."""
    rule = _RULES.get(getattr(operation, "overloadpacket", None))
    if rule is None:
        return NO_SCRATCH
    return rule(*args, **kwargs)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _sum(tensor: torch.Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Scratch:
    """`make_reduction` in `ReduceOpsUtils.h`: a copy in the type of the result, but where the kernel converts."""
    if not tensor.is_floating_point():
        return _as_int64(tensor)
    taken: list[Block] = [_reduction(tensor, dims)]
    if dtype not in (None, tensor.dtype, torch.float32):
        taken.insert(0, tensor.numel() * dtype.itemsize)
    return Scratch(after=(tuple(taken),))


def _over(tensor: torch.Tensor, dims: Any = None, *_: Any, **__: Any) -> Scratch:
    return Scratch(after=((_reduction(tensor, dims),),))


def _reduction(tensor: torch.Tensor, dims: Any) -> Reduction:
    if isinstance(dims, int):
        dims = (dims,)
    return Reduction.of(tensor, tuple(dims or ()))


def _as_int64(tensor: torch.Tensor, *_: Any, **__: Any) -> Scratch:
    """A copy of whole numbers in the type that they are summed in."""
    if tensor.is_floating_point() or tensor.dtype is torch.int64:
        return NO_SCRATCH
    return Scratch(after=((tensor.numel() * INT64_BYTES,),))


def _softmax_backward(gradient: torch.Tensor, *_: Any) -> Scratch:
    """`softmax_backward_cuda_out` in `SoftMax.cu`: the product of gradient and output."""
    return Scratch(after=((gradient.nbytes,),))


def _foreach_norm(tensors: list[torch.Tensor], *_: Any, **__: Any) -> Scratch:
    """`foreach_tensor_norm_cuda` in `ForeachReduceOp.cu`: a number for each chunk (`kChunkSize`) that a tensor has, or
    would have if it were the largest."""
    chunks = max(-(-tensor.numel() // 65536) for tensor in tensors)
    return Scratch(before=(len(tensors) * chunks * FP32_BYTES,))


def _embedding_backward(gradient: torch.Tensor, indices: torch.Tensor, *_: Any) -> Scratch:
    """`embedding_dense_backward_cuda` in `Embedding.cu` and `embedding_backward_cuda_kernel` in
    `EmbeddingBackwardKernel.cu`: more than 3,072 indices are sorted; then come the segments of equal ones, each cut
    into pieces of 10 (`NROWS_PER_THREAD`), and a row for each piece that there may be. Without what CUB sorts in."""
    count = indices.numel()
    width = gradient.shape[-1]
    if count <= 3072:
        return NO_SCRATCH
    indices_bytes = count * INT64_BYTES
    pieces = count // 10 + count
    segments = (
        indices_bytes,
        INT64_BYTES,
        indices_bytes,
        indices_bytes,
        INT64_BYTES,
        pieces * INT64_BYTES,
        pieces * width * FP32_BYTES,
    )
    return Scratch(before=(indices_bytes, indices_bytes), after=(segments,))


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: Any, dropout: float = 0.0, *_: Any, **__: Any
) -> Scratch:
    if dropout:
        return NO_SCRATCH
    batch, heads, tokens, width = query.shape
    return Scratch(after=((Splits(batch * heads, tokens, key.shape[-2], width),),))


def _flash_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: Any,
    value: Any,
    out: torch.Tensor,
    *_: Any,
    **__: Any,
) -> Scratch:
    """`mha_bwd` in `flash_attn/flash_api.cpp`: row sums of the softmax's gradient, (B, H, T'), and an fp32 accumulator
    of the query's gradient, (B, T', H, D'), with T' a multiple of 128 and D' of 32. What is not (B, T, H, D) in memory
    is copied first (`_flash_attention_backward` in `attention_backward.cu`)."""
    copies = []
    for tensor in (gradient, out):
        if not tensor.transpose(1, 2).is_contiguous():
            copies.append(tensor.nbytes)
    return Scratch(before=tuple(copies), after=(_flash_sums(query),))


def _flash_sums(query: torch.Tensor) -> tuple[int, int]:
    batch, heads, tokens, width = query.shape
    rows = batch * heads * _multiple(tokens, 128)
    return rows * FP32_BYTES, rows * _multiple(width, 32) * FP32_BYTES


def _cudnn_backward(gradient: torch.Tensor, query: torch.Tensor, *_: Any, **__: Any) -> Scratch:
    """In one piece what flash attention takes in two, and cuDNN's own."""
    return Scratch(after=((sum(_flash_sums(query)) + CUDNN_WORKSPACE,),))


def _efficient_backward(gradient: torch.Tensor, query: torch.Tensor, *_: Any, **__: Any) -> Scratch:
    """`_efficient_attention_backward` in `attention_backward.cu`: delta, (B, H, T) in fp32, which kernels for fp32 have
    computed for them (`kKernelComputesDelta` in `mem_eff_attention/kernel_backward.h`), and the accumulators of the
    query's gradient (`workspace_size`, `GradQTempStorage`): 64 × 64 numbers and 16 bytes for each block of queries."""
    batch, heads, tokens, width = query.shape
    delta = batch * heads * tokens * FP32_BYTES
    blocks = batch * heads * -(-tokens // 64) * -(-width // 64)
    kernel = delta, blocks * (64 * 64 * FP32_BYTES + 4 * INT32_BYTES)
    if query.dtype is not torch.float32:
        return Scratch(after=(kernel,))
    product_and_sums = query.numel() * FP32_BYTES, delta, delta  # the sum comes twice, once transposed
    return Scratch(after=(product_and_sums, kernel))


_RULES: dict[Any, Callable[..., Scratch]] = {
    aten.sum: _sum,
    aten.mean: _over,
    aten.linalg_vector_norm: lambda tensor, order=2, dims=None, *_, **__: _over(tensor, dims),
    aten.cumsum: _as_int64,
    aten._softmax_backward_data: _softmax_backward,
    aten._foreach_norm: _foreach_norm,
    aten.embedding_dense_backward: _embedding_backward,
    aten._scaled_dot_product_flash_attention: _flash_forward,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_cudnn_attention: lambda *_, **__: Scratch(after=((CUDNN_WORKSPACE,),)),
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}

# Operations that take their results in another order than they return them (`Dropout.cu`: the mask comes first), or
# return some that are not on the GPU: the state of the random numbers of efficient attention (`attention.cu`).
ORDERS: dict[Any, tuple[int, ...]] = {
    aten.native_dropout: (1, 0),
    aten._scaled_dot_product_efficient_attention: (0, 1),
}

# Of these the results with these numbers are fp32 on CUDA, whatever the inputs are; on a CPU they have the inputs' type
# (`layer_norm_kernel.cu`, `LayerNormKernelImplInternal`: mean and reciprocal deviation are accumulated in fp32).
IN_FP32: dict[Any, tuple[int, ...]] = {aten.native_layer_norm: (1, 2)}
