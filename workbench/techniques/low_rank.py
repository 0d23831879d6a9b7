"""The base of LoRA and its relatives: the settings of a low-rank update, and the config of PEFT's that they make."""

from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.models.family import ModelFamily, family_of
from workbench.techniques.base import Adapter, Arguments, Call, add_adapter


@dataclass(frozen=True)
class LowRank(Adapter):
    """Base of the techniques that add (alpha / rank) · B·A to frozen matrices W (D, C), with A (rank, C), B (D, rank).

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685. A takes C inputs to `rank`
    numbers, and B these to D outputs; A starts at random and B as 0, so training starts from the model as it is. The
    customary learning rate is ten times that of full fine-tuning (Schulman et al., "LoRA Without Regret", 2025).
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
        """Return the names of the matrices that are adapted."""
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

        if self.targets == "all-linear":
            return list(family.matrices)
        if self.targets != "auto":
            return self.targets.split("+")
        # For most kinds of models PEFT adapts queries and values. Where no matrix has these names, all are adapted.
        usual = USUAL.get(family.model_type, ("q_proj", "v_proj"))
        return [name for name in usual if name in family.matrices] or list(family.matrices)

    def update(self, family: ModelFamily) -> Arguments:
        """Return the settings of `LoraConfig`, without those that are its defaults."""
        settings = {"r": self.rank, "lora_alpha": self.alpha, "target_modules": self.matrices(family)}
        if self.dropout:
            settings["lora_dropout"] = self.dropout
        if family.matrices_are_transposed:  # GPT-2's `Conv1D` stores (in, out)
            settings["fan_in_fan_out"] = True
        return settings

    def model(self, family: ModelFamily) -> Call:
        from peft import LoraConfig

        return add_adapter(LoraConfig, **self.update(family))
