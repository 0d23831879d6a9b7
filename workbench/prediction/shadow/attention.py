"""CUDA's choice of an attention kernel, and a traceable stand-in for each.

The rules are those of PyTorch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`priority_order`,
`can_use_*_attention`), the layout of masks that of `transformers/attention.cpp` (`convert_boolean_attn_mask`,
`pad_bias`). On Hopper and Blackwell cuDNN comes first, but its dropout knows only multiples of 1/16, so GPT-2's 0.1
goes to flash attention.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, cast

import torch

from workbench.gpus.catalogue import Gpu

MASK_ALIGNMENT = 16  # elements of which a row of the efficient kernel's mask has a multiple
HALF = (torch.float16, torch.bfloat16)


class Backend(StrEnum):
    """The kernels for attention, by the names that `torch.backends.cuda` has for them."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "mem_efficient"
    MATH = "math"


@dataclass(frozen=True)
class Question:
    """The facts that decide the choice, besides the GPU.

    Attributes:
        grouped: whether keys and values have fewer heads than queries.
        head_width, value_width: elements of a query's head and of a value's.
        square: whether there are as many keys as queries.
        enabled: the backends that the user's context allows.
    """

    dtype: torch.dtype
    masked: bool
    grouped: bool
    head_width: int
    value_width: int
    square: bool
    causal: bool
    dropout: float
    needs_gradient: bool
    enabled: frozenset[Backend]


def choose_backend(gpu: Gpu, q: Question) -> Backend:
    """Return the first backend, in CUDA's order of preference, that can answer the question on this GPU."""
    order = {Backend.CUDNN: _cudnn, Backend.FLASH: _flash, Backend.EFFICIENT: _efficient}
    for backend, can in order.items():
        if backend in q.enabled and can(gpu, q):
            return backend
    return Backend.MATH


def _cudnn(gpu: Gpu, q: Question) -> bool:
    return (
        q.dtype in HALF
        and gpu.compute_capability[0] in (9, 10)  # PyTorch prefers cuDNN on these alone
        and (q.dropout * 16).is_integer()
        and max(q.head_width, q.value_width) <= 128
        and q.head_width % 8 == q.value_width % 8 == 0
    )


def _flash(gpu: Gpu, q: Question) -> bool:
    narrow = gpu.compute_capability[0] == 12 or (8, 6) <= gpu.compute_capability <= (8, 9)
    wide_without_room = narrow and q.needs_gradient and q.head_width > 192 and (q.dropout > 0 or q.head_width <= 224)
    return (
        q.dtype in HALF
        and gpu.compute_capability >= (8, 0)
        and not q.masked
        and q.head_width == q.value_width <= 256
        and not (q.causal and not q.square)
        and not wide_without_room
    )


def _efficient(gpu: Gpu, q: Question) -> bool:
    modern = gpu.compute_capability >= (8, 0)
    if q.grouped or q.dtype not in (*HALF, torch.float32) or (q.dtype is torch.bfloat16 and not modern):
        return False
    alignment = 8  # elements of a row
    if q.dtype is torch.float32 and modern:
        alignment = 4
    elif q.dtype is torch.float32:
        alignment = 1
    return q.head_width % alignment == 0 and q.value_width % alignment == 0


@dataclass
class CudaAttention:
    """The attention that replaces `torch.nn.functional.scaled_dot_product_attention`.

    Attributes:
        answers: each question that was asked, with its backend. GPUs that answer all of them alike share a trace.
    """

    gpu: Gpu
    answers: dict[Question, Backend] = field(default_factory=dict)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        query = _autocast(query)
        key = _autocast(key)
        value = _autocast(value)
        grouped = query.shape[-3] != key.shape[-3]
        enabled = [backend for backend in Backend if getattr(torch.backends.cuda, f"{backend}_sdp_enabled")()]
        if grouped and not enable_gqa:
            enabled = [Backend.MATH]  # the other backends cannot expand heads without being asked to
        question = Question(
            dtype=query.dtype,
            masked=attn_mask is not None,
            grouped=grouped,
            head_width=query.shape[-1],
            value_width=value.shape[-1],
            square=query.shape[-2] == key.shape[-2],
            causal=is_causal,
            dropout=float(dropout_p),  # a config may have the integer 0
            needs_gradient=torch.is_grad_enabled()
            and (query.requires_grad or key.requires_grad or value.requires_grad),
            enabled=frozenset(enabled),
        )
        backend = self.answers.setdefault(question, choose_backend(self.gpu, question))
        aten: Any = torch.ops.aten
        if attn_mask is not None and backend is not Backend.MATH:
            attn_mask = _additive(_autocast(attn_mask), query)
        gradient = question.needs_gradient
        if backend is Backend.FLASH:
            return _flash_forward(query, key, value, dropout_p, is_causal, scale)
        if backend is Backend.CUDNN:
            attend = aten._scaled_dot_product_cudnn_attention
            arguments: tuple[Any, ...] = attn_mask, gradient, dropout_p, is_causal, False
        elif backend is Backend.EFFICIENT:
            attend = aten._scaled_dot_product_efficient_attention
            arguments = _expand(attn_mask, query, key), gradient, dropout_p, is_causal
        else:
            attend = partial(aten._scaled_dot_product_attention_math, enable_gqa=enable_gqa)
            arguments = attn_mask, dropout_p, is_causal, None
        return cast("torch.Tensor", attend(query, key, value, *arguments, scale=scale)[0])


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor as autocast does: attention is on its list of operations in lower precision."""
    if torch.is_autocast_enabled("cpu") and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


def _flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run flash attention. A head width that is no multiple of 8 is padded before the kernel and cut after it."""
    width = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(width)
    missing = -width % 8
    if missing:
        query = torch.nn.functional.pad(query, (0, missing))
        key = torch.nn.functional.pad(key, (0, missing))
        value = torch.nn.functional.pad(value, (0, missing))
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = flash(query, key, value, dropout, causal, False, scale=scale)[0]
    if missing:
        return out[..., :width]
    return out


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Turn a boolean mask into one of zeros and -inf in the query's type.

    Each layer makes its own, and keeps it for its backward pass.
    """
    if mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device))


def _expand(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask as a view of shape (B, H, T, S). Its rows are padded in memory if they are not aligned."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, MASK_ALIGNMENT - width % MASK_ALIGNMENT))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
