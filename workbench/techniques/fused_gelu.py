"""Fused GELU: the same activation function as one operation, which keeps its input and nothing else."""

from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.models.family import ModelFamily, family_of
from workbench.techniques.base import Arguments, Stage, Technique


@dataclass(frozen=True)
class FusedGelu(Technique):
    """GPT-2's `gelu_new` is written out in Python: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).

    Its backward pass keeps three intermediate results of shape (B, T, 4C) in every block: x/2, the tanh, and 1 + tanh.
    `gelu_pytorch_tanh` is the same formula as one kernel of PyTorch's, `gelu(approximate="tanh")`, which keeps x alone.
    Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv 1606.08415.
    """

    stage = Stage.ARCHITECTURE

    def check_config(self, config: Any) -> None:
        if not family_of(config).fused_activation:
            raise ConfigurationError(
                f"{self.name}: no GELU of the kind {config.model_type!r} is written out in Python, so there is none to "
                f"fuse here. Leave {self.name} out."
            )

    def model_arguments(self, family: ModelFamily) -> Arguments:
        return {**family.fused_activation}
