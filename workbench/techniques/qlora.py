"""QLoRA: LoRA on a model whose frozen matrices are stored in 4 bits."""

from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.measure.categories import Category
from workbench.models.family import ModelFamily
from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Technique
from workbench.techniques.low_rank import LowRank, add_low_rank

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SCALED, SCALES_SCALED = 64, 256  # numbers that share a scale, and scales that do (bitsandbytes 0.50)


@dataclass(frozen=True)
class Qlora(LowRank):
    """The matrices of all blocks are stored as 4-bit numbers with a scale for every 64; A and B of LoRA in fp32.

    Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314; bitsandbytes does it, and its
    `Linear4bit` takes the place of GPT-2's `Conv1D`. A matrix is turned back into floating point each time it is used.
    Embeddings (with the tied head), LayerNorms and biases stay as they are. With `double_quantization` the scales are
    8-bit numbers with a scale of their own for every 256. The learning rate is that of LoRA.
    """

    format: str = setting("nf4", "the sixteen numbers that 4 bits stand for", choices=("nf4", "fp4"))
    double_quantization: bool = setting(True, "quantize the scales too")
    compute: str = setting("float32", "what the matrices are turned into for use", choices=("float32", "bfloat16"))

    name: ClassVar[str] = "qlora"
    title: ClassVar[str] = "QLoRA"
    family: ClassVar[str] = "adapters"
    attacks: ClassVar[tuple[Category, ...]] = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity; weights rounded to 4 bits, and turned back at every use"
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER, Capability.QUANTIZED_WEIGHTS})

    def missing(self, device_type: str) -> str | None:
        if find_spec("bitsandbytes") is None:
            return "qlora needs the package bitsandbytes, which is not installed: pip install bitsandbytes==0.50.2"
        if device_type not in ("cpu", "cuda"):
            return f"qlora: bitsandbytes has no 4-bit kernels for {device_type}. Use --device cpu."
        return None

    def model_arguments(self, family: ModelFamily) -> Arguments:
        from transformers import BitsAndBytesConfig

        quantization = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.format,
            "bnb_4bit_use_double_quant": self.double_quantization,
            "bnb_4bit_compute_dtype": self.compute,
        }
        return {"quantization_config": Call(BitsAndBytesConfig, quantization), "device_map": {"": "cpu"}}

    def model(self, family: ModelFamily) -> Call:
        return Call(add_low_rank_to_four_bits, self.update(family))

    def stand_in(self) -> Technique:
        """bitsandbytes quantizes while it loads, and multiplies in kernels of its own, which are not traced."""
        packing = {"double": self.double_quantization, "compute": self.compute}
        return self.replacing(
            model_arguments=lambda _, family: {},
            model=lambda _, family: Call(add_low_rank_to_stand_ins, {**packing, **self.update(family)}),
        )


def add_low_rank_to_four_bits(model: "PreTrainedModel", **update: Any) -> Any:
    """A and B beside the matrices of a model that was loaded in 4 bits."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # else an evaluation repacks the weights for a kernel without a backward pass (bitsandbytes 0.50)
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute, no parameter
    return add_low_rank(model, **update)


def add_low_rank_to_stand_ins(model: "PreTrainedModel", double: bool, compute: str, **update: Any) -> Any:
    """For predictions: matrices of the bytes that bitsandbytes makes of them, and products that unpack them as its own
    do, with A and B beside them."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            adapted = name.rpartition(".")[2] in update["targets"]
            model.set_submodule(name, four_bit_linear(module, double, compute, copies=adapted))
    return add_low_rank(model, **update)


def scales(numbers: int, double: bool) -> "dict[str, torch.Tensor]":
    """What belongs to so many 4-bit numbers: `QuantState` in bitsandbytes 0.50, as `quantize_4bit` fills it."""
    import torch

    count = ceil(numbers / SCALED)
    code = {"code": torch.empty(16)}  # the values that 4 bits stand for
    if not double:
        return {**code, "absmax": torch.empty(count)}
    return {
        **code,
        "absmax": torch.empty(count, dtype=torch.uint8),
        "offset": torch.empty(()),
        "absmax_absmax": torch.empty(ceil(count / SCALES_SCALED)),
        "absmax_code": torch.empty(256),
    }


def four_bit_linear(conv: Any, double: bool, compute: str, copies: bool) -> "torch.nn.Module":
    """A module that allocates as bitsandbytes' `Linear4bit` does in the place of a `Conv1D`.

    Forward and backward each turn the matrix back and drop it again (`MatMul4Bit`; on a GPU, few rows are multiplied
    without that). With `copies` the result is copied, as PEFT does with that of a layer it adapts.
    """
    import torch

    inputs, outputs = conv.weight.shape
    shape, dtype, compute_dtype = (outputs, inputs), conv.weight.dtype, getattr(torch, compute)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, x.new_empty(shape, dtype=dtype).to(x.dtype), bias)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return torch.matmul(gradient, gradient.new_empty(shape, dtype=dtype).to(gradient.dtype)), None, None

    multiply: Any = Product.apply

    class FourBitLinear(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = multiply(x.to(compute_dtype), self.weight, self.bias).to(x.dtype)
            return out.clone() if copies else out

    with torch.device("meta"):
        made = FourBitLinear(inputs, outputs)
        made.weight = torch.nn.Parameter(torch.empty(inputs * outputs // 2, 1, dtype=torch.uint8), requires_grad=False)
        made.bias = torch.nn.Parameter(conv.bias.to(compute_dtype), requires_grad=False)
        for name, tensor in scales(inputs * outputs, double).items():
            made.register_buffer(name, tensor)
    made.weight.quant_state = SimpleNamespace(shape=torch.Size(shape))  # type: ignore[attr-defined]  # for who counts
    return made
