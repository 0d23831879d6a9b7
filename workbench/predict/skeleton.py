"""A model without memory: what predictions begin with."""

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from workbench.errors import ConfigurationError
from workbench.models.load import BUILT, quiet, settled
from workbench.techniques.base import Arguments


def can_be_skeleton(config: PreTrainedConfig, arguments: Arguments) -> bool:
    """Whether these arguments of `from_pretrained` do not act while weights are loaded, as quantization does."""
    return not _missed(settled(config, arguments)[1])


def _missed(arguments: Arguments) -> list[str]:
    return sorted(set(arguments) - set(BUILT))


def skeleton(config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """The model on the meta device: shapes and types, no memory.

    Args:
        arguments: of `from_pretrained`: `dtype`, `attn_implementation` and settings of the config.

    Raises:
        ConfigurationError: another argument, whose effect on loading would be missed.
    """
    config, arguments = settled(config, {"dtype": "float32", **arguments})
    if missed := _missed(arguments):
        raise ConfigurationError(
            f"predict: {missed[0]} acts while weights are loaded, which a prediction does not do. "
            "Measure this recipe with `run`, or give the technique that asks for it a `stand_in`."
        )
    with quiet(), torch.device("meta"), no_init_weights():
        model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config, **arguments)
    model.tie_weights()
    model.loss_type = "ForCausalLM"  # as `load_model` sets it
    return model
