"""What LoRA and its relatives share: the settings of a low-rank update, and how PEFT is asked for it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.errors import ConfigurationError
from workbench.settings import setting
from workbench.techniques.base import Capability, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MATRICES = ("c_attn", "c_fc", "c_proj")


@dataclass(frozen=True)
class LowRank(Technique):
    """Base of the techniques that add (alpha / rank) · A·B to frozen matrices, A (C, rank) and B (rank, D).

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. The customary learning rate is
    ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting("c_attn", "matrices to adapt, joined by +, out of " + ", ".join(MATRICES))

    numerics: ClassVar[Numerics] = Numerics.DIFFERENT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ADAPTER})

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [target for target in self.targets.split("+") if target not in MATRICES]
        if wrong:
            raise ConfigurationError(
                f"{self.name}: GPT-2 has no matrix {wrong[0]!r}. Choose from {', '.join(MATRICES)}, joined by +."
            )

    @property
    def learning_rate_factor(self) -> float:
        return 10.0

    def adapted(self, model: "PreTrainedModel", **more: Any) -> "PreTrainedModel":
        """The model with A and B beside its matrices; `more` are arguments of PEFT's `LoraConfig`."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets.split("+"),
            fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out), the transpose of nn.Linear
            **more,
        )
        return get_peft_model(model, config)  # type: ignore[no-any-return]

    def lines(self, *more: str) -> tuple[str, ...]:
        """The same for a script; `more` are whole lines of arguments."""
        targets = ", ".join(f'"{target}"' for target in self.targets.split("+"))
        return (
            "adapter = LoraConfig(",
            '    task_type="CAUSAL_LM",',
            f"    r={self.rank},",
            f"    lora_alpha={self.alpha},",
            f"    lora_dropout={self.dropout},",
            f"    target_modules=[{targets}],",
            "    fan_in_fan_out=True,  # GPT-2's Conv1D stores (in, out)",
            *more,
            ")",
            "model = get_peft_model(model, adapter)",
        )
