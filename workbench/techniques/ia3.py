"""(IA)³: freeze the model, learn one factor for each of some inner activations."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.models.family import ModelFamily
from workbench.techniques.base import Adapter, Call, add_adapter


@dataclass(frozen=True)
class Ia3(Adapter):
    """The 3 C outputs of `c_attn` and the 4 C inputs of the MLP's `c_proj` get factors, in every block of GPT-2.

    Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning", arXiv
    2205.05638. The paper scales keys and values; GPT-2 computes them in one matrix with the queries, so PEFT scales
    all three; of other kinds of models PEFT has a table. The factors start as 1: L · (3 + 4) · C parameters. The
    gradient of a factor needs the activation that it multiplies, so that is kept.

    The paper's rate is 3e-3 (with Adafactor), that of PEFT's example 8e-3. The factor was the best of 10, 30, 100 and
    300 on the embedded model, after 30 steps on Shakespeare.
    """

    retired = MappingProxyType({"feedforward": True})

    def check_config(self, config: Any) -> None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as SCALED

        if config.model_type not in SCALED:
            raise ConfigurationError(
                f"{self.name}: PEFT does not say which activations of the kind "
                f"{config.model_type!r} are scaled. Use lora; of other kinds it does: "
                f"{', '.join(sorted(SCALED))}."
            )
        super().check_config(config)

    def model(self, family: ModelFamily) -> Call:
        from peft import IA3Config
        from peft.utils import constants

        model_type = family.model_type
        return add_adapter(
            IA3Config,
            target_modules=constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING[model_type],
            # PEFT scales the inputs of these matrices, and the outputs of the others.
            feedforward_modules=constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING[model_type],
            fan_in_fan_out=family.matrices_are_transposed,
        )
