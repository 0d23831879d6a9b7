"""Pure bf16: weights, gradients and optimizer states of 16 bits; no fp32 copy of anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.device import NATIVE_BF16, Device
from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Capability, Stage, Technique


@dataclass(frozen=True)
class PureBf16(Technique):
    """The model is loaded in bf16. Gradients and Adam's averages are made like the weights, so they are bf16 too.

    bf16 keeps 8 significant bits: an update below about 1/512 to 1/256 of its weight is rounded away. Zamirai et al.,
    "Revisiting BFloat16 Training", arXiv 2010.06192, show that this, and not the rounding of activations, is what
    costs accuracy. Autocast would be of no use here: there is no fp32 left to compute less exactly.
    """

    stage = Stage.QUANTIZE
    brings = frozenset({Capability.SIXTEEN_BIT_WEIGHTS})

    def missing(self, device: Device) -> str | None:
        if device.computes_bf16:
            return None
        return "pure_bf16 needs compute capability 8.0 or newer. Drop it."

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        if compute_capability is None or compute_capability >= NATIVE_BF16:
            return (cls(),)
        return ()

    def model_arguments(self, family: ModelFamily) -> Arguments:
        return {"dtype": "bfloat16"}

    @classmethod
    def find_in(cls, arguments: Arguments, facts: Mapping[str, Any]) -> Technique | None:
        return cls() if 2 in facts["trained_itemsizes"] else None
