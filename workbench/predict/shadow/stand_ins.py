"""What stands in for libraries whose kernels cannot be traced, or that keep tensors on the host, which is no part of
the device here: the same bytes at the same moments, no arithmetic.

One for each kind of storage that a library brings, whichever technique asks for it. It need not be installed. The bytes
are those of bitsandbytes 0.50, FlashOptim 0.1.4 and torchao 0.18, as each docstring names them.
"""

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Trainer

from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Call

SCALED = 64  # 4-bit numbers that share a scale
SCALES_SCALED = 256  # scales that share one themselves
EIGHT_BIT_BLOCK = 256  # this and the next two: `Optimizer2State`
EIGHT_BIT_MINIMUM = 4096
EIGHT_BIT_VALUES = 256
PAGED_MINIMUM = 100_000  # elements: `get_state_buffer`
HOSTS_MINIMUM = 4096  # `minimal_size`


# ---- weights of 4 bits ----


def take_quantization(arguments: Arguments) -> Arguments | None:
    """The settings of a `BitsAndBytesConfig`, taken out of the arguments of loading; None without one."""
    config: Call | None = arguments.pop("quantization_config", None)
    if config is None:
        return None
    arguments.pop("device_map", None)
    return dict(config.settings)


def pack_matrices(model: Any, family: ModelFamily, settings: Arguments) -> None:
    """Put a `FourBitLinear` in the place of each matrix that adapters may change, as quantized loading does."""
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in family.matrices:
            shape = tuple(module.weight.shape)
            shape = shape if isinstance(module, torch.nn.Linear) else shape[::-1]  # transformers' `Conv1D`
            model.set_submodule(name, FourBitLinear(shape, module.weight.dtype, module.bias, settings))


def copy_adapted(model: Any) -> None:
    """PEFT copies the result of a 4-bit layer that it adapts."""
    for module in model.modules():
        if isinstance(base := getattr(module, "base_layer", None), FourBitLinear):
            base.copies = True


class _Product(torch.autograd.Function):
    """Forward and backward each turn the matrix back and drop it again (`MatMul4Bit`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: "FourBitLinear", bias: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.turned_back(x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.matmul(gradient, ctx.layer.turned_back(gradient)), None, None


class FourBitLinear(torch.nn.Linear):
    """Allocates as bitsandbytes' `Linear4bit` does. On a GPU, few rows are multiplied without turning it back whole.

    Args:
        shape: (outputs, inputs) of the matrix, `dtype` its type before.
        settings: of the `BitsAndBytesConfig`.
    """

    copies = False  # whether the result is copied

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, bias: torch.Tensor | None, settings: Arguments
    ) -> None:
        outputs, inputs = shape
        with torch.device("meta"):
            super().__init__(inputs, outputs, bias is not None)
            packed = torch.empty(inputs * outputs // 2, 1, dtype=torch.uint8)
            for name, tensor in _scales(inputs * outputs, settings["bnb_4bit_use_double_quant"]).items():
                self.register_buffer(name, tensor)
        self.compute = getattr(torch, settings["bnb_4bit_compute_dtype"])
        self.matrix_dtype = dtype
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        if bias is not None:
            self.bias = torch.nn.Parameter(bias.to(self.compute), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(shape=torch.Size(shape))  # type: ignore[attr-defined]  # for who counts

    def turned_back(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix in floating point: a new tensor, and another one if it is needed in another type."""
        return like.new_empty((self.out_features, self.in_features), dtype=self.matrix_dtype).to(like.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        multiply: Any = _Product.apply
        out: torch.Tensor = multiply(x.to(self.compute), self, self.bias).to(x.dtype)
        return out.clone() if self.copies else out


def _scales(numbers: int, double: bool) -> dict[str, torch.Tensor]:
    """What belongs to so many 4-bit numbers: `QuantState`, as `quantize_4bit` fills it."""
    count = math.ceil(numbers / SCALED)
    # the values that 4 bits stand for, and the scales
    tensors = {"code": torch.empty(16), "absmax": torch.empty(count)}
    if double:
        tensors["absmax"] = torch.empty(count, dtype=torch.uint8)
        tensors["offset"] = torch.empty(())
        tensors["absmax_absmax"] = torch.empty(math.ceil(count / SCALES_SCALED))
        tensors["absmax_code"] = torch.empty(256)
    return tensors


# ---- optimizer states of 8 bits, or in unified memory ----


def optimizer_kind(arguments: Any, model: Any = None) -> tuple[Any, Any]:
    """In place of `Trainer.get_optimizer_cls_and_kwargs`, which would bring AdamW from bitsandbytes."""
    kind = arguments.optim.value
    if re.fullmatch("adamw_(bnb_)?8bit|paged_adamw_(8|32)bit", kind):
        return LibrarysAdamW, {"bits": 8 if kind.endswith("_8bit") else 32, "paged": kind.startswith("paged")}
    return Trainer.get_optimizer_cls_and_kwargs(arguments, model)


class LibrarysAdamW(torch.optim.Optimizer):
    """The bytes of `Optimizer2State.init_state`, made in the first step, for the parameters that are trained.

    The library's kernels change weights and states in place; besides, a gradient is made contiguous. Large states that
    are paged take nothing of what PyTorch's allocator has.
    """

    def __init__(self, parameters: Any, bits: int, paged: bool) -> None:
        super().__init__(parameters, {})
        self.bits = bits
        self.paged_from = PAGED_MINIMUM if paged else math.inf
        self.embeddings: set[int] = set()  # for which the Trainer asks for 32-bit states, of an optimizer it makes
        self.tables: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter)
            parameter.grad = parameter.grad.contiguous()

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        both = (1, 2)
        here = both if parameter.numel() < self.paged_from else ()
        if self.bits == 32 or parameter.numel() < EIGHT_BIT_MINIMUM or id(parameter) in self.embeddings:
            return {f"state{i}": torch.zeros_like(parameter, dtype=torch.float32) for i in here}
        blocks = math.ceil(parameter.numel() / EIGHT_BIT_BLOCK)
        for i in both:
            self.tables.setdefault(f"qmap{i}", torch.empty(EIGHT_BIT_VALUES, device=parameter.device))
        state = {f"state{i}": torch.zeros_like(parameter, dtype=torch.uint8) for i in here}
        for i in both:
            state[f"absmax{i}"] = torch.zeros(blocks, device=parameter.device)
        return state | self.tables


class FlashStates(LibrarysAdamW):
    """What `flashoptim.FlashAdamW` allocates for bf16 weights (`_ensure_state_initialized`)."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, **_: Any) -> None:
        super().__init__([{**group, "lr": lr} for group in groups], bits=8, paged=False)

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            plain = torch.zeros_like(parameter)
            state[name] = torch.empty_like(plain, dtype=torch.uint8)
            state[f"{name} scales"] = plain.new_empty((plain.numel() + 31) // 32, dtype=torch.float16)
        state["error_bits"] = torch.zeros_like(parameter, dtype=torch.int8)
        return state


# ---- tensors that wait on the host ----


class HostsAdamW(torch.optim.Optimizer):
    """`torchao.optim.CPUOffloadOptimizer`: on the device are the states of smaller parameters alone."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        small = [{**g, "params": [p for p in g["params"] if p.numel() < HOSTS_MINIMUM]} for g in groups]
        self.d_opt = torch.optim.AdamW(small, **options)
        self.param_d2h_map: dict[Any, Any] = {}
        self.param_groups = self.d_opt.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.d_opt.step()


class SavedNowhere(torch.autograd.graph.saved_tensors_hooks):
    """`torch.autograd.graph.save_on_cpu`: what comes back is contiguous, and new."""

    def __init__(self, **_: Any) -> None:
        super().__init__(
            lambda saved: (saved.size(), saved.dtype), lambda packed: torch.empty(packed[0], dtype=packed[1])
        )


MODULES: dict[str, Any] = {  # of libraries, for `sys.modules`
    "flashoptim": SimpleNamespace(FlashAdamW=FlashStates),
    "torchao.optim.cpu_offload": SimpleNamespace(CPUOffloadOptimizer=HostsAdamW),
}


@contextmanager
def replaced_libraries() -> Iterator[None]:
    """For the duration what is imported from MODULES stands in. What else is imported meanwhile stays."""
    before = {name: sys.modules[name] for name in MODULES if name in sys.modules}
    sys.modules.update(MODULES)
    try:
        yield
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
