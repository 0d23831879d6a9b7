"""What LoRA and its relatives share: the settings of a low-rank update, and how PEFT is asked for it."""

from dataclasses import dataclass
from typing import Any

from workbench.errors import ConfigurationError
from workbench.models.family import ModelFamily
from workbench.models.gpt2 import GPT2
from workbench.models.known import family_of
from workbench.settings import setting
from workbench.techniques.base import Adapter, Call, add_adapter


@dataclass(frozen=True)
class LowRank(Adapter):
    """Base of the techniques that add (alpha / rank) · A·B to frozen matrices, A (C, rank) and B (rank, D).

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. The customary learning rate is
    ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting(GPT2.matrices[0], f"matrices to adapt, joined by +, out of {', '.join(GPT2.matrices)}")

    learning_rate_factor = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [target for target in self.targets.split("+") if target not in GPT2.matrices]:
            raise ConfigurationError(
                f"{self.name}: GPT-2 has no matrix {wrong[0]!r}. Choose from {', '.join(GPT2.matrices)}, joined by +."
            )

    def check_config(self, config: Any) -> None:
        width = family_of(config).shortest_side(config, self.targets.split("+"))
        if self.rank > width:
            raise ConfigurationError(
                f"{self.name}: rank {self.rank} is more than the width of the smallest matrix that it adapts, {width}. "
                f"Use at most that; 8 is usual."
            )

    def update(self, family: ModelFamily) -> dict[str, Any]:
        """The settings of `add_adapter`; `fan_in_fan_out`: matrices are stored (in, out), as GPT-2's `Conv1D` does."""
        from peft import LoraConfig

        numbers = {"kind": LoraConfig, "r": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        return {**numbers, "target_modules": self.targets.split("+"), "fan_in_fan_out": family.matrices_are_transposed}

    def model(self, family: ModelFamily) -> Call:
        return Call(add_adapter, self.update(family))
