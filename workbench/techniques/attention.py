"""Attention: the scores of every token against every other are either kept, or computed again block by block."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.base.settings import setting
from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Call, Stage, Technique


def set_attention(model: Any, implementation: str) -> Any:
    """Change how a model computes attention, and return the model."""
    model.set_attn_implementation(implementation)
    return model


@dataclass(frozen=True)
class Attention(Technique):
    """The choice of how attention is computed; the default is `sdpa`, PyTorch's `scaled_dot_product_attention`.

    `eager` computes attention step by step and keeps the probabilities of every layer, B · n_head · T² values, until
    the backward pass. The fused kernels behind `sdpa` keep one number a row and compute the rest again: Dao et al.,
    "FlashAttention", arXiv 2205.14135. Which kernel runs depends on device, dtype, mask and dropout: on the CPU, any
    dropout in attention means the plain one, which keeps the probabilities too.
    """

    implementation: str = setting(
        "eager", "how attention is computed; sdpa is the default", choices=("eager", "sdpa"), in_label=True
    )

    stage = Stage.ARCHITECTURE
    called = MappingProxyType(
        {"implementation=eager": "eager attention", "implementation=sdpa": "fused attention (SDPA)"}
    )
    worth_trying = ({"implementation": "sdpa"},)

    def __post_init__(self) -> None:
        super().__post_init__()
        # A plan offers `sdpa` to a training that has `eager` attention. `object`, because the dataclass is frozen.
        if self.implementation == "sdpa":
            object.__setattr__(self, "remaining_shares", {"activations": 0.6})
            object.__setattr__(self, "slower", -0.1)

    def model_arguments(self, family: ModelFamily) -> Arguments:
        return {"attn_implementation": self.implementation}

    def change_loaded_model(self, family: ModelFamily) -> Call:
        return Call(set_attention, {"implementation": self.implementation})
