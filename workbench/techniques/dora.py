"""DoRA: LoRA learns the directions of a matrix's columns, and a vector their lengths."""

from dataclasses import dataclass

from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments
from workbench.techniques.low_rank import LowRank


@dataclass(frozen=True)
class Dora(LowRank):
    """W' = m · V / ‖V‖ with V = W + (alpha / rank) · B·A is used; A (rank, C), B (D, rank) and D lengths m are trained.

    Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv 2402.09353. ‖V‖ is taken for each of the D outputs
    and starts equal to m, so training starts from the model as it is. It is a constant for the gradient (section 4.3),
    but computing it takes a matrix as large as W at every step. The learning rate is that of LoRA; the paper used
    LoRA's or a little less.
    """

    def update(self, family: ModelFamily) -> Arguments:
        return {**super().update(family), "use_dora": True}
