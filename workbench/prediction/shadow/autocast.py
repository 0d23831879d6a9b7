"""CUDA's autocast rules on the CPU, at the dispatcher.

`torch.autocast("cpu")` runs matrix products in lower precision as CUDA does, but leaves most other operations alone,
where CUDA runs some in fp32 and saves fp32 copies of their inputs: GPT-2's `gelu_new` uses `pow`, so under CUDA's
autocast the MLP's inner activations are fp32. Kernels for the dispatch key `AutocastCPU` say so here. Being real
autocast kernels, they also act on what gradient checkpointing recomputes inside the backward pass, which Python's
function modes do not see.

The lists (`autocast.json`): `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` in `ATen/autocast_mode.h`, those that a
language model and its losses can meet. With each softmax stands the fused operation behind it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from workbench.base.paths import beside

LISTS = beside(__file__, "autocast.json")

_KEY = "AutocastCPU"
_excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Inside, `torch.autocast("cpu")` casts what CUDA's autocast casts."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in LISTS["inputs_in_fp32"]:
            library.impl(name, partial(_in_fp32, _operation(name)), _KEY)
        for name in LISTS["result_in_fp32"]:
            library.impl(name, partial(_to_fp32, _operation(name)), _KEY)
        for name, fused in LISTS["softmaxes"].items():
            library.impl(name, partial(_softmax, _operation(name), getattr(torch.ops.aten, fused)), _KEY)
        yield


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _up(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_up, value))
    if _eligible(value):
        return value.to(torch.float32)
    return value


def _in_fp32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        return operation(*map(_up, args), **{name: _up(arg) for name, arg in kwargs.items()})


def _to_fp32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """The operation is told to return fp32; its input stays as it is."""
    if _eligible(args[0]) and kwargs.get("dtype") is None:
        kwargs["dtype"] = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        return operation(*args, **kwargs)


def _softmax(
    operation: Any,
    fused: Any,
    tensor: torch.Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> Any:
    """As above; from fp16, CUDA's kernel converts while it reads and needs no copy (`softmax` in `SoftMax.cpp`)."""
    if _eligible(tensor) and dtype is None:
        dtype = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        if tensor.dtype is torch.float16 and dtype is torch.float32:
            return fused(tensor, dim, True)
        return operation(tensor, dim, dtype)
