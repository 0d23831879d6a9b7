"""LoRA: freeze the model, learn a low-rank update of some of its matrices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.errors import ConfigurationError
from workbench.memory.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATRICES = ("c_attn", "c_fc", "c_proj")


@dataclass(frozen=True)
class Lora(Technique):
    """W is frozen; W + (alpha / rank) · A·B is used, and only A (C, rank) and B (rank, D) are trained.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. Gradients and optimizer states
    exist for A and B alone. Activations hardly shrink: the gradient still flows through every layer. The customary
    learning rate is ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting("c_attn", "matrices to adapt, joined by +, out of " + ", ".join(MATRICES))

    name: ClassVar[str] = "lora"
    title: ClassVar[str] = "LoRA"
    attacks: ClassVar[tuple[Category, ...]] = (Category.GRADIENTS, Category.OPTIMIZER_STATES)
    costs: ClassVar[str] = "capacity: only a low-rank change of the chosen matrices can be learned"
    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [target for target in self.targets.split("+") if target not in MATRICES]
        if wrong:
            raise ConfigurationError(
                f"lora: GPT-2 has no matrix {wrong[0]!r}. Choose from {', '.join(MATRICES)}, joined by +."
            )

    @property
    def learning_rate_factor(self) -> float:
        return 10.0

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets.split("+"),
            fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out), the transpose of nn.Linear
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def script(self) -> Fragment:
        targets = ", ".join(f'"{target}"' for target in self.targets.split("+"))
        return Fragment(
            imports=("from peft import LoraConfig, get_peft_model",),
            model=(
                "adapter = LoraConfig(",
                '    task_type="CAUSAL_LM",',
                f"    r={self.rank},",
                f"    lora_alpha={self.alpha},",
                f"    lora_dropout={self.dropout},",
                f"    target_modules=[{targets}],",
                "    fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out)",
                ")",
                "model = get_peft_model(model, adapter)",
            ),
        )
