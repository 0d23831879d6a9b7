"""Stand-ins for weights of 4 bits: they allocate the same bytes at the same moments, without arithmetic.

The kernels of bitsandbytes cannot be traced, nor does a model without memory load. The bytes are those of bitsandbytes
0.50, which need not be installed.
"""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from peft import get_peft_model

NUMBERS_PER_SCALE = 64  # 4-bit numbers that share a scale
SCALES_PER_SCALE = 256  # scales that share a scale of their own


def add_to_packed(
    model: Any,
    peft_config: Any,
    matrices: Iterable[str],
    compute: str,
    double_quantization: bool,
) -> Any:
    """Pack the matrices of these names, as quantized loading does, and add the adapter beside them."""
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
    """A layer that allocates as bitsandbytes' `Linear4bit` does, by turning the matrix back into floating point.

    On a GPU, few rows are multiplied without turning it back whole.

    Args:
        plain: the layer that it replaces.
        compute: the type in which it multiplies.
        double: the scales are quantized too.
    """

    # Whether the result is copied: PEFT does so with the result of a 4-bit layer that it adapts.
    copies = False

    def __init__(self, plain: Any, compute: torch.dtype, double: bool) -> None:
        outputs, inputs = plain.weight.shape
        # transformers' `Conv1D` stores (inputs, outputs).
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
        # `count_parameters` reads the shape there.
        self.weight.quant_state = SimpleNamespace(shape=torch.Size((outputs, inputs)))  # type: ignore[attr-defined]

    def turn_back(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate the matrix in floating point, and once more if it is needed in another type."""
        return like.new_empty((self.out_features, self.in_features), dtype=self.matrix_dtype).to(like.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        multiply: Any = _Product.apply
        out: torch.Tensor = multiply(x.to(self.compute), self, self.bias).to(x.dtype)
        return out.clone() if self.copies else out


class _Product(torch.autograd.Function):
    """The product as `MatMul4Bit` has it: forward and backward each turn the matrix back and drop it again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: FourBitLinear, bias: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.turn_back(x), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return torch.matmul(gradient, ctx.layer.turn_back(gradient)), None, None


def _scales(numbers: int, double: bool) -> dict[str, torch.Tensor]:
    """Allocate the tensors that belong to so many 4-bit numbers: `QuantState`, as `quantize_4bit` fills it."""
    count = math.ceil(numbers / NUMBERS_PER_SCALE)
    # `code` has the sixteen values that 4 bits stand for, `absmax` the scales.
    tensors = {"code": torch.empty(16), "absmax": torch.empty(count)}
    if double:
        tensors["absmax"] = torch.empty(count, dtype=torch.uint8)
        tensors["offset"] = torch.empty(())
        tensors["absmax_absmax"] = torch.empty(math.ceil(count / SCALES_PER_SCALE))
        tensors["absmax_code"] = torch.empty(256)
    return tensors
