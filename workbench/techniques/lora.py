"""LoRA: freeze the model, learn a low-rank update of some of its matrices."""

from dataclasses import dataclass

from workbench.techniques.low_rank import LowRank


@dataclass(frozen=True)
class Lora(LowRank):
    """W is frozen; W + (alpha / rank) · B·A is used, and only A and B are trained.

    Gradients and optimizer states exist for A and B alone. Activations hardly shrink: the gradient still flows through
    every layer.
    """
