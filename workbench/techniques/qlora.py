"""QLoRA: LoRA on a model whose frozen matrices are stored in 4 bits."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from workbench.errors import ConfigurationError
from workbench.memory.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Arguments, Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATRICES = ("c_attn", "c_fc", "c_proj")


@dataclass(frozen=True)
class Qlora(Technique):
    """The matrices of all blocks are stored as 4-bit numbers with a scale for every 64; A and B of LoRA in fp32.

    Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", arXiv 2305.14314; bitsandbytes does it, and its
    `Linear4bit` takes the place of GPT-2's `Conv1D`. A matrix is turned back into floating point each time it is used.
    Embeddings (with the tied head), LayerNorms and biases stay as they are. With `double_quantization` the scales are
    8-bit numbers with a scale of their own for every 256. The learning rate is that of LoRA.
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting("c_attn", "matrices to adapt, joined by +, out of " + ", ".join(MATRICES))
    format: str = setting("nf4", "the sixteen numbers that 4 bits stand for", choices=("nf4", "fp4"))
    double_quantization: bool = setting(True, "quantize the scales too")
    compute: str = setting("float32", "what the matrices are turned into for use", choices=("float32", "bfloat16"))

    name: ClassVar[str] = "qlora"
    title: ClassVar[str] = "QLoRA"
    family: ClassVar[str] = "adapters"
    attacks: ClassVar[tuple[Category, ...]] = (Category.WEIGHTS, Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity; weights rounded to 4 bits, and turned back at every use"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER, Capability.QUANTIZED_WEIGHTS})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [target for target in self.targets.split("+") if target not in MATRICES]
        if wrong:
            raise ConfigurationError(
                f"qlora: GPT-2 has no matrix {wrong[0]!r}. Choose from {', '.join(MATRICES)}, joined by +."
            )

    @property
    def learning_rate_factor(self) -> float:
        return 10.0

    def missing(self, device_type: str) -> str | None:
        if find_spec("bitsandbytes") is None:
            return "qlora needs the package bitsandbytes, which is not installed: pip install bitsandbytes==0.50.2"
        if device_type not in ("cpu", "cuda"):
            return f"qlora: bitsandbytes has no 4-bit kernels for {device_type}. Use --device cpu."
        return None

    def model_arguments(self, arguments: Arguments) -> Arguments:
        from transformers import BitsAndBytesConfig

        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.format,
            bnb_4bit_use_double_quant=self.double_quantization,
            bnb_4bit_compute_dtype=self.compute,
        )
        return {**arguments, "quantization_config": quantization, "device_map": {"": "cpu"}}

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from peft import LoraConfig, get_peft_model

        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                # else an evaluation repacks the weights for a kernel without a backward pass (bitsandbytes 0.50)
                module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # an attribute, no parameter
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets.split("+"),
            fan_in_fan_out=True,  # of no effect here, but the adapter may be loaded on a Conv1D
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def script(self) -> Fragment:
        targets = ", ".join(f'"{target}"' for target in self.targets.split("+"))
        return Fragment(
            imports=("from peft import LoraConfig, get_peft_model", "from transformers import BitsAndBytesConfig"),
            definitions=(
                "QUANTIZATION = BitsAndBytesConfig(",
                "    load_in_4bit=True,",
                f'    bnb_4bit_quant_type="{self.format}",',
                f"    bnb_4bit_use_double_quant={self.double_quantization},",
                f'    bnb_4bit_compute_dtype="{self.compute}",',
                ")",
            ),
            loading={"quantization_config": "QUANTIZATION"},
            model=(
                "for module in model.modules():",
                '    if hasattr(module, "support_avx512bf16_for_cpu"):',
                "        # else an evaluation repacks the weights for a kernel without a backward pass",
                "        module.support_avx512bf16_for_cpu = False",
                "adapter = LoraConfig(",
                '    task_type="CAUSAL_LM",',
                f"    r={self.rank},",
                f"    lora_alpha={self.alpha},",
                f"    lora_dropout={self.dropout},",
                f"    target_modules=[{targets}],",
                "    fan_in_fan_out=True,  # of no effect here, but the adapter may be loaded on a Conv1D",
                ")",
                "model = get_peft_model(model, adapter)",
            ),
        )
