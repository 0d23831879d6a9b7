"""Mixed precision: matrix products in bf16 or fp16, weights, gradients and optimizer states in fp32."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.device import NATIVE_BF16, Device
from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Capability, Stage, Technique

SCALED_OTHERWISE = "DeepSpeed scales the loss in its own way, not yet held against one process; take dtype:bf16"


@dataclass(frozen=True)
class MixedPrecision(Technique):
    """Autocast casts the weights at each use and leaves them fp32; what matrix products save takes half the bytes.

    Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740. fp16 needs loss scaling, since small gradients
    would round to zero; bf16 has the exponent range of fp32 and does not.
    """

    dtype: str = setting("bf16", "type of the matrix products", choices=("bf16", "fp16"))

    stage = Stage.WRAP
    forbids = frozenset({Capability.SIXTEEN_BIT_WEIGHTS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype == "fp16":
            object.__setattr__(self, "brings", frozenset({Capability.LOSS_SCALING}))
            object.__setattr__(self, "why_not_on_shards", {"deepspeed": SCALED_OTHERWISE})

    def missing(self, device: Device) -> str | None:
        if self.dtype == "fp16" and device.kind == "cpu":
            return (
                "mixed_precision=dtype:fp16 needs a GPU, and this run is on the cpu: loss scaling "
                "is not done there, and the Trainer would silently train in fp32. Use dtype:bf16."
            )
        if self.dtype == "bf16" and not device.computes_bf16:
            return "mixed_precision=dtype:bf16 needs compute capability 8.0 or newer. Use dtype:fp16 on this GPU."
        return None

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        has_bf16 = compute_capability is None or compute_capability >= NATIVE_BF16
        return (cls(dtype="bf16" if has_bf16 else "fp16"),)

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, self.dtype: True}

    @classmethod
    def find_in(cls, arguments: Arguments, facts: Mapping[str, Any]) -> Technique | None:
        for dtype in ("fp16", "bf16"):
            if arguments.get(dtype):
                return cls(dtype)
        return None
