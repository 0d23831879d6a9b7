"""Measure single operations, forward and backward, in bytes above what their inputs take: `h100/operations.csv`.

    python operations.py found.json

Each runs twice in an empty cache, since the second time finds workspaces and plans; the second time counts.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import bitsandbytes as bnb
import torch
from card import empty_caches
from torch import Tensor, nn
from torch.nn import functional

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ATTENTION_SHAPES = (  # batch, heads, tokens
    (2, 12, 1024),
    (3, 5, 777),
    (8, 12, 512),
)
VOCABULARY = 50257
Operation = Callable[[], Any]
Case = tuple[str, Callable[[], Operation]]  # a name, and a function that makes the inputs


def main() -> None:
    peaks = {name: measure(prepare) for name, prepare in cases()}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(peaks, file, indent=0)


def measure(prepare: Callable[[], Operation]) -> dict[str, int | None]:
    empty_caches()
    operation = prepare()
    base = torch.cuda.memory_allocated()
    peaks: dict[str, int | None] = {}
    for _ in range(2):
        torch.cuda.empty_cache()
        forward_bytes, result = peak_above(base, operation)
        peaks = {"forward_bytes": forward_bytes, "backward_bytes": None}
        if isinstance(result, Tensor) and result.requires_grad:
            gradient = torch.ones_like(result) if result.dim() else None
            peaks["backward_bytes"], _ = peak_above(base, partial(result.backward, gradient))
            del gradient
        del result
    return peaks


def peak_above(base: int, operation: Operation) -> tuple[int, Any]:
    torch.cuda.reset_peak_memory_stats()
    result = operation()
    return torch.cuda.max_memory_allocated() - base, result


def cases() -> Iterator[Case]:
    for name, dtype in TYPES.items():
        yield from attentions(name, dtype)
        yield from layers(name, dtype)
        yield from others(name, dtype)
    yield from optimizers()


def attentions(name: str, dtype: torch.dtype) -> Iterator[Case]:
    widths = (32, 64, 80, 96, 128, 256)
    if name == "fp32":
        widths = (32, 40, 64, 72, 80, 96, 128, 192, 256)
    modes = ("causal", "full", "mask", "gqa")
    for width, shape, dropout, mode in product(widths, ATTENTION_SHAPES, (0.0, 0.1), modes):
        if shape == ATTENTION_SHAPES[2] and width not in (64, 128):
            continue
        if mode in ("mask", "gqa") and (dropout or width in (40, 72, 192)):
            continue
        sizes = "x".join(map(str, (*shape, width)))
        prepare = partial(attention, shape, width, dropout, mode, dtype)
        yield f"sdpa {name} {sizes} p{dropout} {mode}", prepare


def attention(
    shape: tuple[int, int, int],
    width: int,
    dropout: float,
    mode: str,
    dtype: torch.dtype,
) -> Operation:
    batch, heads, tokens = shape
    groups = 1 if mode == "gqa" else heads
    query = tensor(batch, heads, tokens, width, dtype=dtype)
    key = tensor(batch, groups, tokens, width, dtype=dtype)
    value = tensor(batch, groups, tokens, width, dtype=dtype)
    mask = None
    if mode == "mask":
        mask = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool, device="cuda")
    return partial(
        functional.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mode == "causal",
        enable_gqa=mode == "gqa",
    )


def layers(name: str, dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in product((1000, 8192), (768, 1600, 3072, 4096)):
        size = f"{name} {rows}x{width}"
        modules: dict[str, Callable[..., nn.Module]] = {
            "layernorm": partial(nn.LayerNorm, width),
            "rmsnorm": partial(nn.RMSNorm, width),
            "linear": partial(nn.Linear, width, 4 * width),
        }
        functions: dict[str, Callable[[Tensor], Tensor]] = {
            "gelu": partial(functional.gelu, approximate="tanh"),
            "softmax": partial(functional.softmax, dim=-1),
            "dropout": partial(functional.dropout, p=0.1),
            "sum0": partial(torch.sum, dim=0),
            "norm": torch.linalg.vector_norm,
        }
        for title, module in modules.items():
            yield f"{title} {size}", partial(module_on, module, (rows, width), dtype)
        for title, function in functions.items():
            yield f"{title} {size}", partial(function_on, function, (rows, width), dtype)
        yield f"conv1d {size}", partial(conv1d, rows, width, dtype)
    for rows in (1000, 8192):
        yield f"embedding {name} {rows}", partial(embedding, rows, dtype)
        yield f"cross_entropy {name} {rows}", partial(cross_entropy, rows, dtype)


def module_on(
    module: Callable[..., nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Operation:
    layer = module(device="cuda", dtype=dtype)
    return partial(layer, tensor(*shape, dtype=dtype))


def function_on(
    function: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Operation:
    return partial(function, tensor(*shape, dtype=dtype))


def conv1d(rows: int, width: int, dtype: torch.dtype) -> Operation:
    """Prepare GPT-2's linear layer, whose weight is stored transposed."""
    weight = tensor(width, 4 * width, dtype=dtype)
    bias = tensor(4 * width, dtype=dtype)
    x = tensor(rows, width, dtype=dtype)
    return partial(torch.addmm, bias, x, weight)


def embedding(rows: int, dtype: torch.dtype) -> Operation:
    layer = nn.Embedding(VOCABULARY, 768, device="cuda", dtype=dtype)
    return partial(layer, token_ids(rows))


def cross_entropy(rows: int, dtype: torch.dtype) -> Operation:
    logits = tensor(rows, VOCABULARY, dtype=dtype)
    return partial(functional.cross_entropy, logits, token_ids(rows))


def others(name: str, dtype: torch.dtype) -> Iterator[Case]:
    patches = partial(nn.Conv2d, 3, 768, 16, 16)
    logits = (64, VOCABULARY)
    yield f"conv2d {name}", partial(module_on, patches, (8, 3, 224, 224), dtype)
    yield f"bmm {name}", partial(matrix_product, dtype)
    yield f"cumsum {name}", partial(function_on, partial(torch.cumsum, dim=-1), logits, dtype)
    yield f"topk {name}", partial(function_on, highest, logits, dtype)
    yield f"sort {name}", partial(function_on, in_order, logits, dtype)


def matrix_product(dtype: torch.dtype) -> Operation:
    left = tensor(96, 1024, 64, dtype=dtype)
    right = tensor(96, 64, 1024, dtype=dtype)
    return partial(torch.matmul, left, right)


def highest(x: Tensor) -> Tensor:
    return x.topk(50)[0]


def in_order(x: Tensor) -> Tensor:
    return x.sort()[0]


def optimizers() -> Iterator[Case]:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (bnb.optim.AdamW8bit, {}),
        (bnb.optim.PagedAdamW8bit, {}),
        (bnb.optim.AdamW, {}),
    ]
    for kind, settings in kinds:
        library = kind.__module__.split(".")[0]
        yield f"{library} {kind.__name__} {settings}", partial(optimizer_step, kind, settings)


def optimizer_step(kind: Any, settings: dict[str, Any]) -> Operation:
    """Prepare the second step of an optimizer: the first makes its states."""
    parameters = [tensor(768, 3072) for _ in range(24)]
    parameters.append(tensor(VOCABULARY, 768))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = kind(parameters, **settings)
    optimizer.step()
    return partial(optimizer.step)


def token_ids(rows: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows,), device="cuda")


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_()


if __name__ == "__main__":
    main()
