"""CUDA's autocast rules on the CPU, at the dispatcher.

`torch.autocast("cpu")` runs matrix products in lower precision as CUDA does, but leaves most other operations alone,
where CUDA runs some in fp32 and saves fp32 copies of their inputs: GPT-2's `gelu_new` uses `pow`, so under CUDA's
autocast the MLP's inner activations are fp32. Kernels for the dispatch key `AutocastCPU` say so here. Being real
autocast kernels, they also act on what gradient checkpointing recomputes inside the backward pass, which Python's
function modes do not see.

The lists in `autocast.json` are `AT_FORALL_FP32` and `AT_FORALL_FP32_SET_OPT_DTYPE` of `ATen/autocast_mode.h`, as far
as a language model and its losses can meet them. Beside each softmax is the fused operation that does its work.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from workbench.base.paths import read_beside

LISTS = read_beside(__file__, "autocast.json")

_KEY = "AutocastCPU"
_excluded = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let `torch.autocast("cpu")` cast what CUDA's autocast casts."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in LISTS["inputs_in_fp32"]:
            library.impl(name, partial(_in_fp32, _operation(name)), _KEY)
        for name in LISTS["result_in_fp32"]:
            library.impl(name, partial(_to_fp32, _operation(name)), _KEY)
        for name, fused in LISTS["softmaxes"].items():
            library.impl(name, partial(_softmax, _operation(name), getattr(torch.ops.aten, fused)), _KEY)
        yield


def _operation(name: str) -> Any:
    """Return the operation of the dispatcher with a name such as `sum.dim_IntList`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _eligible(value: Any) -> bool:
    """Whether autocast casts this argument: a tensor of floating-point numbers, and not in fp64."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast_up(value: Any) -> Any:
    """Return an argument in fp32, or as it is if autocast does not cast it. Lists are cast item by item."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_cast_up, value))
    if _eligible(value):
        return value.to(torch.float32)
    return value


def _in_fp32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on inputs in fp32."""
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        return operation(*map(_cast_up, args), **{name: _cast_up(arg) for name, arg in kwargs.items()})


def _to_fp32(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that is told to return fp32. Its input stays as it is."""
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
    """Run a softmax that returns fp32.

    From fp16, CUDA's kernel converts while it reads and needs no copy (`softmax` in `SoftMax.cpp`): `fused` does so.
    """
    if _eligible(tensor) and dtype is None:
        dtype = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(_excluded):
        if tensor.dtype is torch.float16 and dtype is torch.float32:
            return fused(tensor, dim, True)
        return operation(tensor, dim, dtype)
