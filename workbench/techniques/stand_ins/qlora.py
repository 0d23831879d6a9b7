"""What a prediction puts in the place of weights of 4 bits: the same bytes at the same moments, no arithmetic.

The kernels of bitsandbytes cannot be traced, nor does a model without memory load. The bytes are those of bitsandbytes
0.50, which need not be installed.
"""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model

SCALED = 64  # 4-bit numbers that share a scale
SCALES_SCALED = 256  # scales that share one themselves


def add_to_packed(
    model: Any,
    peft_config: Any,
    matrices: Iterable[str],
    compute: str,
    double_quantization: bool,
) -> Any:
    """The adapter beside a model whose matrices of these names are packed, as quantized loading leaves them."""
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in matrices:
            model.set_submodule(name, FourBitLinear(module, getattr(torch, compute), double_quantization))
    model = get_peft_model(model, peft_config)
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, FourBitLinear):
            base.copies = True
    return model


class FourBitLinear(torch.nn.Linear):
    """Allocates as bitsandbytes' `Linear4bit` does. On a GPU, few rows are multiplied without turning it back whole.

    Args:
        plain: the layer in whose place it comes.
        compute: the type in which it multiplies.
        double: the scales are quantized too.
    """

    # whether the result is copied, as PEFT does with that of a 4-bit layer which it adapts
    copies = False

    def __init__(self, plain: Any, compute: torch.dtype, double: bool) -> None:
        outputs, inputs = plain.weight.shape
        # transformers' `Conv1D` is stored (inputs, outputs)
        if not isinstance(plain, torch.nn.Linear):
            outputs, inputs = inputs, outputs
        with torch.device("meta"):
            super().__init__(inputs, outputs, plain.bias is not None)
            packed = torch.empty(inputs * outputs // 2, 1, dtype=torch.uint8)
            for name, tensor in _scales(inputs * outputs, double).items():
                self.register_buffer(name, tensor)
        self.compute = compute
        self.matrix_dtype = plain.weight.dtype
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        if plain.bias is not None:
            self.bias = torch.nn.Parameter(plain.bias.to(compute), requires_grad=False)
        # for who counts parameters
        self.weight.quant_state = SimpleNamespace(shape=torch.Size((outputs, inputs)))  # type: ignore[attr-defined]

    def turned_back(self, like: torch.Tensor) -> torch.Tensor:
        """The matrix in floating point: a new tensor, and another one if it is needed in another type."""
        return like.new_empty((self.out_features, self.in_features), dtype=self.matrix_dtype).to(like.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        multiply: Any = _Product.apply
        out: torch.Tensor = multiply(x.to(self.compute), self, self.bias).to(x.dtype)
        if self.copies:
            return out.clone()
        return out


class _Product(torch.autograd.Function):
    """Forward and backward each turn the matrix back and drop it again (`MatMul4Bit`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear, bias: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.turned_back(x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.matmul(gradient, ctx.layer.turned_back(gradient)), None, None


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
