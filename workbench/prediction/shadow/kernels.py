"""The memory that CUDA's kernels take otherwise than a CPU's, and that PyTorch's dispatcher does not see.

No number is fitted; each is read from the source that allocates it. Scratch that a kernel gives back as it returns is
left out, but for that of reductions and of the norm of all gradients: that of attention, embeddings and softmax moves a
peak of allocated memory by at most 0.05 %, and of reserved memory by 0.4 % (`data/reference/emulator.md`).
"""

from typing import Any

import torch

aten: Any = torch.ops.aten

# Each runs through cuBLAS, whose workspace belongs to a handle; every thread that multiplies has a handle of its own
# (`ATen/cuda/CublasHandlePool.cpp`), and cuBLASLt shares it. The workspace is never given back.
MATRIX_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmv, aten.mv, aten._scaled_mm})

# Operations that are no views and still launch nothing.
NO_KERNEL = frozenset({aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty})

# Operations that take their results in another order than they return them (`Dropout.cu`: the mask comes first), or
# return some that are not on the GPU: the state of the random numbers of efficient attention (`attention.cu`).
ORDERS: dict[Any, tuple[int, ...]] = {
    aten.native_dropout: (1, 0),
    aten._scaled_dot_product_efficient_attention: (0, 1),
}

# Operations of which some results, here by their numbers, are fp32 on CUDA, whatever the inputs are. On a CPU they have
# the inputs' type (`layer_norm_kernel.cu`, `LayerNormKernelImplInternal`: mean and reciprocal deviation are accumulated
# in fp32).
IN_FP32: dict[Any, tuple[int, ...]] = {aten.native_layer_norm: (1, 2)}


def bytes_before(operation: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operation takes before its results, and gives back after them.

    The norm of several tensors takes an fp32 number for each chunk (`kChunkSize`) that a tensor has, or would have if
    it were as large as the largest (`foreach_tensor_norm_cuda` in `ForeachReduceOp.cu`). Others take nothing here.
    """
    if operation is not aten._foreach_norm:
        return 0
    tensors: list[torch.Tensor] = args[0]
    chunks = max(-(-tensor.numel() // 65536) for tensor in tensors)
    return len(tensors) * chunks * 4
