"""What LoRA and its relatives share: the settings of a low-rank update, and how PEFT is asked for it."""

from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.models.family import ModelFamily, family_of
from workbench.techniques.base import Adapter, Arguments, Call, add_adapter


@dataclass(frozen=True)
class LowRank(Adapter):
    """Base of the techniques that add (alpha / rank) · A·B to frozen matrices, A (C, rank) and B (rank, D).

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. The customary learning rate is
    ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
    """

    rank: int = setting(8, "rank of the update", minimum=1)
    alpha: float = setting(16.0, "scale: the update is multiplied by alpha / rank", minimum=0.001)
    dropout: float = setting(0.0, "dropout before A", minimum=0.0, maximum=0.9)
    targets: str = setting("auto", "matrices to adapt, joined by +, or all-linear; auto: as PEFT does for this kind")

    learning_rate_factor = 10.0

    def check_config(self, config: Any) -> None:
        family = family_of(config)
        names = self.matrices(family)
        for name in names:
            if name not in family.matrices:
                raise ConfigurationError(
                    f"{self.name}: {family.model_type} has no matrix {name!r}. Choose from "
                    f"{', '.join(family.matrices)}, joined by +, or take all-linear."
                )
        width = min(family.matrices[name] for name in names)
        if self.rank > width:
            raise ConfigurationError(
                f"{self.name}: rank {self.rank} is more than the width of the smallest matrix that "
                f"it adapts, {width}. Use at most that; 8 is usual."
            )
        super().check_config(config)

    def matrices(self, family: ModelFamily) -> list[str]:
        """The names of the matrices that are adapted."""
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

        if self.targets == "all-linear":
            return list(family.matrices)
        if self.targets != "auto":
            return self.targets.split("+")
        # queries and values are what PEFT adapts of most kinds; a model without matrices of these names has all adapted
        usual = USUAL.get(family.model_type, ("q_proj", "v_proj"))
        return [name for name in usual if name in family.matrices] or list(family.matrices)

    def update(self, family: ModelFamily) -> Arguments:
        """The settings of `LoraConfig`, without those that have its own defaults."""
        settings = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.matrices(family)}
        if self.dropout:
            settings["lora_dropout"] = self.dropout
        if family.matrices_are_transposed:  # stored (in, out), as GPT-2's `Conv1D` does
            settings["fan_in_fan_out"] = True
        return settings

    def model(self, family: ModelFamily) -> Call:
        from peft import LoraConfig

        return add_adapter(LoraConfig, **self.update(family))
