"""Peaks of single operations, forward and backward, in bytes above what their inputs take: `h100/operations.csv`.

    python operations.py found.json

Each runs twice in an empty cache, since the second time finds workspaces and plans; the second time counts.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import bitsandbytes as bnb
import torch
from torch import nn
from torch.nn import functional

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = ((2, 12, 1024), (3, 5, 777), (8, 12, 512))  # batch, heads, tokens
Case = tuple[str, Callable[[], Callable[[], Any]]]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


def peak_above(base: int, run: Callable[[], Any]) -> tuple[int, Any]:
    torch.cuda.reset_peak_memory_stats()
    made = run()
    return torch.cuda.max_memory_allocated() - base, made


def measured(make: Callable[[], Callable[[], Any]]) -> dict[str, int | None]:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    forward = make()
    base, found = torch.cuda.memory_allocated(), {}
    for _ in range(2):
        torch.cuda.empty_cache()
        up, result = peak_above(base, forward)
        found = {"forward_bytes": up, "backward_bytes": None}
        if isinstance(result, torch.Tensor) and result.requires_grad:
            gradient = torch.ones_like(result) if result.dim() else None
            found["backward_bytes"], _ = peak_above(base, partial(result.backward, gradient))
            del gradient
        del result
    return found


def attention(name: str, dtype: torch.dtype) -> Iterator[Case]:
    widths = (32, 40, 64, 72, 80, 96, 128, 192, 256) if name == "fp32" else (32, 64, 80, 96, 128, 256)
    for width, shape, dropout, mode in product(widths, SHAPES, (0.0, 0.1), ("causal", "full", "mask", "gqa")):
        odd = width not in (64, 128) and shape == SHAPES[2]
        if odd or (mode in ("mask", "gqa") and (dropout or width in (40, 72, 192))):
            continue

        def make(width=width, shape=shape, dropout=dropout, mode=mode) -> Callable[[], torch.Tensor]:  # type: ignore[no-untyped-def]
            batch, heads, tokens = shape
            groups = heads if mode != "gqa" else 1
            q = tensor(batch, heads, tokens, width, dtype=dtype)
            k, v = (tensor(batch, groups, tokens, width, dtype=dtype) for _ in range(2))
            mask = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device="cuda") if mode == "mask" else None
            settings = {"attn_mask": mask, "dropout_p": dropout, "is_causal": mode == "causal"}
            return lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=mode == "gqa", **settings)

        yield f"sdpa {name} {'x'.join(map(str, (*shape, width)))} p{dropout} {mode}", make


def layers(name: str, dtype: torch.dtype) -> Iterator[Case]:
    place = {"device": "cuda", "dtype": dtype}
    for rows, width in product((1000, 8192), (768, 1600, 3072, 4096)):
        size, of = f"{name} {rows}x{width}", (rows, width)
        modules = {
            "layernorm": lambda w=width: nn.LayerNorm(w, **place),
            "rmsnorm": lambda w=width: nn.RMSNorm(w, **place),
            "linear": lambda w=width: nn.Linear(w, 4 * w, **place),
        }
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "gelu": lambda x: functional.gelu(x, approximate="tanh"),
            "softmax": lambda x: functional.softmax(x, -1),
            "dropout": lambda x: functional.dropout(x, 0.1),
            "sum0": lambda x: x.sum(0),
            "norm": torch.linalg.vector_norm,
        }
        for title, module in modules.items():
            yield f"{title} {size}", lambda m=module, of=of: applied(m(), tensor(*of, dtype=dtype))
        for title, function in functions.items():
            yield f"{title} {size}", lambda f=function, of=of: applied(f, tensor(*of, dtype=dtype))
        yield f"conv1d {size}", lambda of=of: conv1d(*of, dtype)
    for rows in (1000, 8192):
        yield f"embedding {name} {rows}", lambda r=rows: applied(nn.Embedding(50257, 768, **place), words(r))
        yield f"cross_entropy {name} {rows}", lambda r=rows: cross_entropy(r, dtype)


def applied(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: function(x)


def words(rows: int) -> torch.Tensor:
    return torch.randint(50257, (rows,), device="cuda")


def conv1d(rows: int, width: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """GPT-2's linear layer, whose weight is stored transposed."""
    weight, bias, x = (tensor(*shape, dtype=dtype) for shape in ((width, 4 * width), (4 * width,), (rows, width)))
    return lambda: torch.addmm(bias, x, weight)


def cross_entropy(rows: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    logits, target = tensor(rows, 50257, dtype=dtype), words(rows)
    return lambda: functional.cross_entropy(logits, target)


def others(name: str, dtype: torch.dtype) -> Iterator[Case]:
    place = {"device": "cuda", "dtype": dtype}
    yield f"conv2d {name}", lambda: applied(nn.Conv2d(3, 768, 16, 16, **place), tensor(8, 3, 224, 224, dtype=dtype))
    yield f"bmm {name}", lambda: product_of(tensor(96, 1024, 64, dtype=dtype), tensor(96, 64, 1024, dtype=dtype))
    for title, function in (("cumsum", lambda x: x.cumsum(-1)), ("topk", lambda x: x.topk(50)[0])):
        yield f"{title} {name}", lambda f=function: applied(f, tensor(64, 50257, dtype=dtype))
    yield f"sort {name}", lambda: applied(lambda x: x.sort()[0], tensor(64, 50257, dtype=dtype))


def product_of(one: torch.Tensor, other: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: one @ other


def optimizers() -> Iterator[Case]:
    torchs = [
        (torch.optim.AdamW, settings) for settings in ({}, {"foreach": False}, {"fused": True}, {"amsgrad": True})
    ]
    torchs += [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adafactor, {})]
    eights = [(kind, {}) for kind in (bnb.optim.AdamW8bit, bnb.optim.PagedAdamW8bit, bnb.optim.AdamW)]
    for kind, settings in (*torchs, *eights):

        def make(kind: Any = kind, settings: Any = settings) -> Callable[[], Any]:
            parameters = [tensor(768, 3072) for _ in range(24)] + [tensor(50257, 768)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer = kind(parameters, **settings)
            optimizer.step()
            return lambda: optimizer.step()

        yield f"{kind.__module__.split('.')[0]} {kind.__name__} {settings}", make


def cases() -> Iterator[Case]:
    for name, dtype in TYPES.items():
        for some in (attention, layers, others):
            yield from some(name, dtype)
    yield from optimizers()


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({name: measured(make) for name, make in cases()}, file, indent=0)
