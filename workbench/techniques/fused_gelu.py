"""Fused GELU: the same activation function as one operation, which keeps its input and nothing else."""

from dataclasses import dataclass

from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Stage, Technique


@dataclass(frozen=True)
class FusedGelu(Technique):
    """GPT-2's `gelu_new` is written out in Python: x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))).

    Its backward pass keeps three intermediate results of shape (B, T, 4C) in every block: x/2, the tanh, and 1 + tanh.
    `gelu_pytorch_tanh` is the same formula as one kernel of PyTorch's, `gelu(approximate="tanh")`, which keeps x alone.
    Hendrycks and Gimpel, "Gaussian Error Linear Units (GELUs)", arXiv 1606.08415.
    """

    stage = Stage.ARCHITECTURE

    def model_arguments(self, family: ModelFamily) -> Arguments:
        return {**family.fused_activation}
