"""An exact technique beside others finds the losses that these find without it, and saves what it attacks there too.

Partners stand together where they go together: what is not exact beside one of them is not beside all. Two steps are
enough to see a difference: the second loss, and the held-out loss, come after an update.
"""

from dataclasses import dataclass, replace

import pytest

from workbench.base.device import Device
from workbench.recipe import Recipe
from workbench.techniques import (
    ActivationOffloading,
    Attention,
    BatchSize,
    ChunkedCrossEntropy,
    Dora,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Ia3,
    Lora,
    MixedPrecision,
    Numerics,
    Optimizer,
    OptimizerOffloading,
    Padding,
    PureBf16,
    Qlora,
    SelectiveCheckpointing,
    StepInBackward,
    Technique,
)
from workbench.techniques.base import Stage


@dataclass(frozen=True)
class NoClipping(Technique):
    """The Trainer without its clipping by the norm of all gradients."""

    name = "no_clipping"
    title = costs = ""
    stage = Stage.WRAP
    numerics = Numerics.DIFFERENT

    def training_arguments(self, arguments):
        return {**arguments, "max_grad_norm": 0.0}


ACCUMULATION, BF16, LORA = GradientAccumulation(steps=2), MixedPrecision(), Lora(rank=4)
CHECKPOINTING, REENTRANT = GradientCheckpointing(), GradientCheckpointing(use_reentrant=True)
ACTIVATIONS_ON_DISK = ActivationOffloading(to="disk", minimum_bytes=4096)
STATES_ON_DISK = OptimizerOffloading(to="disk", chunk_elements=2**14)
LORA_WITH_DROPOUT = Lora(rank=4, dropout=0.1)
CHUNKED = ChunkedCrossEntropy(chunk=32)
UNCLIPPED = StepInBackward(max_grad_norm=0.0)


@dataclass(frozen=True)
class Pair:
    """A technique, its partners, and how far apart the losses may be; 0: not at all."""

    technique: Technique
    partners: tuple[Technique, ...]
    band: float = 0.0
    dropout: float = 0.0

    @property
    def label(self):
        technique, partners = (Recipe(techniques=chosen).label for chosen in ((self.technique,), self.partners))
        return f"{technique} beside {partners}" + (f", dropout {self.dropout}" if self.dropout else "")


def beside(technique, *rows, band=0.0, dropout=0.0):
    return [Pair(technique, partners, band, dropout) for partners in rows]


PAIRS = [
    *beside(ACTIVATIONS_ON_DISK, (LORA, REENTRANT), (ACCUMULATION, CHECKPOINTING, BF16, LORA_WITH_DROPOUT)),
    *beside(CHECKPOINTING, (LORA, ACCUMULATION, BF16), (FusedGelu(), PureBf16())),
    # with LoRA the input of the first block needs no gradient: the case in which reentrant blocks train nothing
    *beside(REENTRANT, (LORA, ACCUMULATION, BF16)),
    *beside(CHECKPOINTING, (), dropout=0.2),
    *beside(REENTRANT, (), dropout=0.2),
    *beside(CHECKPOINTING, (Dora(),), (Ia3(),), (Qlora(rank=4),), band=1e-5),
    *beside(REENTRANT, (Qlora(rank=4),), band=1e-5),
    *beside(
        SelectiveCheckpointing(),
        (LORA_WITH_DROPOUT, ACCUMULATION, BF16, CHUNKED),
        (Qlora(rank=4),),
        (PureBf16(), FusedGelu()),
        (Attention(),),
    ),
    *beside(
        SelectiveCheckpointing(),
        (),
        (LORA_WITH_DROPOUT, ACCUMULATION, BF16),
        (Qlora(rank=4),),
        (Attention(),),
        dropout=0.2,
    ),
    *beside(UNCLIPPED, (NoClipping(),)),
    # whichever optimizer there is takes its own step; offloading adds up at other elements
    *beside(
        UNCLIPPED,
        (NoClipping(), CHECKPOINTING, CHUNKED, LORA, BF16),
        (NoClipping(), Optimizer(kind="adafactor")),
        (NoClipping(), Optimizer(kind="muon")),
        (NoClipping(), STATES_ON_DISK),
        band=1e-6,
    ),
    *beside(CHUNKED, (ACCUMULATION, CHECKPOINTING, LORA), (Optimizer(kind="adafactor"),), band=2e-5),
    *beside(CHUNKED, (BF16,), band=2e-3),
    *beside(STATES_ON_DISK, (ACCUMULATION, CHECKPOINTING, LORA, ACTIVATIONS_ON_DISK), band=2e-6),
    *beside(STATES_ON_DISK, (BF16,), band=1e-3),  # a last digit may tip a rounding to bf16
    # the optimizer is stepped once for all micro-batches
    *beside(
        GradientAccumulation(steps=4),
        (Optimizer(kind="adamw_loop"),),
        (Optimizer(kind="adafactor"),),
        (Optimizer(kind="muon"),),
        band=1e-4,
    ),
    # every real token weighs alike
    *beside(
        GradientAccumulation(steps=4),
        (Padding(dynamic=False),),
        (Padding(),),
        (Padding(group_by_length=True),),
        band=2e-5,
    ),
    *beside(ACCUMULATION, (BatchSize(size=4),), band=2e-5),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.label)
def test_it_is_exact_beside_other_techniques_too(recipe, fine_tuned, pair):
    without = replace(recipe, steps=2, dropout=pair.dropout, techniques=pair.partners)
    if reasons := [technique.missing(Device("cpu")) for technique in pair.partners if technique.missing(Device("cpu"))]:
        pytest.skip(reasons[0])
    alone, both = fine_tuned(without), fine_tuned(without | pair.technique)
    if pair.band:
        assert both.losses == pytest.approx(alone.losses, rel=pair.band)
        assert both.held_out_loss == pytest.approx(alone.held_out_loss, rel=pair.band)
    else:
        assert both.losses == alone.losses
        assert both.held_out_loss == alone.held_out_loss
    assert both.losses[-1] != both.losses[0]
    assert both.tokens_seen == alone.tokens_seen
    for category in pair.technique.attacks:
        assert both.maximum_by_category[category] < alone.maximum_by_category[category]
