"""QLoRA: LoRA on a model whose frozen matrices are stored in 4 bits."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from workbench.base.device import Device
from workbench.base.settings import setting
from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Call, Capability, Technique
from workbench.techniques.low_rank import LowRank


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

    brings = frozenset({Capability.ADAPTER, Capability.QUANTIZED_WEIGHTS})

    def missing(self, device: Device) -> str | None:
        if find_spec("bitsandbytes") is None:
            return "qlora needs the package bitsandbytes, which is not installed: pip install bitsandbytes==0.50.2"
        if device.kind not in ("cpu", "cuda"):
            return f"qlora: bitsandbytes has no 4-bit kernels for {device.kind}. Use --device cpu."
        if self.compute == "bfloat16" and not device.computes_bf16:
            return "qlora=compute:bfloat16 needs compute capability 8.0 or newer. Use compute:float32 on this GPU."
        return None

    def model_arguments(self, family: ModelFamily) -> Arguments:
        from transformers import BitsAndBytesConfig

        quantization = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.format,
            "bnb_4bit_compute_dtype": self.compute,
            "bnb_4bit_use_double_quant": self.double_quantization,
        }
        return {"quantization_config": Call(BitsAndBytesConfig, quantization), "device_map": {"": "cpu"}}

    def model(self, family: ModelFamily) -> Call:
        return replace(super().model(family), function=add_to_four_bits)

    def stand_in(self) -> Technique:
        """Return the technique with nothing to do at loading: `model` packs the matrices of a model of fake tensors."""
        return self.replacing(model_arguments=LowRank.model_arguments, model=Qlora.pack_model)

    def pack_model(self, family: ModelFamily) -> Call:
        """Take the place of `model` in a prediction: pack the matrices, then add the adapter."""
        from workbench.techniques.stand_ins.qlora import add_to_packed

        settings = {
            "matrices": tuple(family.matrices),
            "compute": self.compute,
            "double_quantization": self.double_quantization,
        }
        return Call(add_to_packed, {**super().model(family).settings, **settings})


def add_to_four_bits(model: Any, peft_config: Any) -> Any:
    """Add the adapter beside the matrices of a model that was loaded in 4 bits."""
    from peft import get_peft_model

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # If this were true, an evaluation would repack the weights for a kernel without a backward pass
            # (bitsandbytes 0.50).
            module.support_avx512bf16_for_cpu = False
    return get_peft_model(model, peft_config)
