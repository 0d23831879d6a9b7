"""Fused GELU: one operation computes the activation function, and keeps its input and nothing else."""

from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.models.family import ModelFamily, family_of
from workbench.techniques.base import Arguments, Call, Stage, Technique


def fuse_gelu(model: Any, settings: dict[str, str]) -> Any:
    """Replace the activations that are written out in Python by one kernel each, and return the model.

    Args:
        settings: the names of the activations in the model's config, which say the same then.
    """
    from transformers.activations import ACT2FN, NewGELUActivation

    for module in model.modules():
        for name, activation in module.named_children():
            if isinstance(activation, NewGELUActivation):
                setattr(module, name, ACT2FN["gelu_pytorch_tanh"])
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


@dataclass(frozen=True)
class FusedGelu(Technique):
    """GPT-2's `gelu_new` is written out in Python: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).

    Its backward pass keeps three intermediate results of shape (B, T, 4C) in every block: x/2, the tanh, and 1 +
    tanh. `gelu_pytorch_tanh` computes the same formula in one kernel of PyTorch's, `gelu(approximate="tanh")`, which
    keeps x alone. Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv 1606.08415.
    """

    stage = Stage.ARCHITECTURE

    def check_config(self, config: Any) -> None:
        if not family_of(config).fused_activation:
            raise ConfigurationError(
                f"{self.name}: no GELU of the kind {config.model_type!r} is written out in Python, "
                f"so there is none to fuse here. Leave {self.name} out."
            )

    def model_arguments(self, family: ModelFamily) -> Arguments:
        return {**family.fused_activation}

    def change_loaded_model(self, family: ModelFamily) -> Call:
        return Call(fuse_gelu, {"settings": family.fused_activation})
