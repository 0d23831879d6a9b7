"""Memory that CUDA kernels and libraries take and PyTorch's dispatcher does not see.

No number is fitted; each is read from the source that allocates it.
"""

from collections.abc import Callable
from typing import Any

import torch

aten: Any = torch.ops.aten

# Each runs through cuBLAS, whose workspace belongs to a handle; every thread that multiplies has a handle of its own
# (`ATen/cuda/CublasHandlePool.cpp`), and cuBLASLt shares it. The workspace is never given back.
MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten._scaled_mm})

FP32_BYTES = 4


def scratch_bytes(operation: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """What a kernel takes besides its results, and gives back when it returns."""
    rule = _RULES.get(operation.overloadpacket) if hasattr(operation, "overloadpacket") else None
    return rule(args) if rule else ()


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _flash_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """`mha_bwd` in `flash_attn/flash_api.cpp`: row sums of the softmax's gradient, (B, H, T'), and an fp32 accumulator
    of the query's gradient, (B, T', H, D'), with T' a multiple of 128 and D' of 32."""
    batch, heads, tokens, width = args[1].shape
    rows = batch * heads * _multiple(tokens, 128)
    return rows * FP32_BYTES, rows * _multiple(width, 32) * FP32_BYTES


def _efficient_backward(args: tuple[Any, ...]) -> tuple[int, ...]:
    """`_efficient_attention_backward` in `attention_backward.cu`: delta, (B, H, T) in fp32; in half precision also
    the kernel's fp32 accumulator of the query's gradient (`kernel_backward.h`, `workspace_size`)."""
    query = args[1]
    batch, heads, tokens, width = query.shape
    delta = batch * heads * tokens * FP32_BYTES
    if query.dtype is torch.float32:
        return (delta,)
    # workspace_elements_gq: blocks of 64 queries, of the width rounded up to the 64, 128 … that the kernel is made for
    return delta, batch * heads * _multiple(tokens, 64) * _multiple(width, 64) * FP32_BYTES


_RULES: dict[Any, Callable[[tuple[Any, ...]], tuple[int, ...]]] = {
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    # cuDNN does not publish its workspace; its algorithm is that of flash attention, and so is taken its scratch
    aten._scaled_dot_product_cudnn_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
