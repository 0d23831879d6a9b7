"""Gradient accumulation: the effective batch in k micro-batches, one optimizer step for all of them."""

from dataclasses import dataclass
from typing import ClassVar

from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Arguments, Capability, Numerics, Stage, Technique


@dataclass(frozen=True)
class GradientAccumulation(Technique):
    """Activations and logits shrink with the micro-batch; gradients, which are summed in place, do not.

    The Trainer divides by the number of tokens of the whole effective batch, so the gradient is that of the large
    batch up to rounding (Hugging Face, "Fixing gradient accumulation", 2024).
    """

    steps: int = setting(4, "micro-batches per optimizer step", minimum=2)

    name: ClassVar[str] = "gradient_accumulation"
    title: ClassVar[str] = "Gradient accumulation"
    stage: ClassVar[Stage] = Stage.BATCHES
    attacks: ClassVar[tuple[Category, ...]] = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)
    costs: ClassVar[str] = "speed, where the micro-batch no longer fills the device"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.ACCUMULATION})

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        return tuple(cls(steps=2**power) for power in range(1, 9))

    def training_arguments(self, arguments: Arguments) -> Arguments:
        batch = arguments["per_device_train_batch_size"]
        if batch % self.steps:
            ways = ", ".join(str(k) for k in range(2, batch + 1)[:4096] if batch % k == 0) or "none: use a larger batch"
            raise ConfigurationError(
                f"{self.name}: a batch of {batch} cannot be split into {self.steps} equal micro-batches. "
                f"Possible steps for this batch: {ways}."
            )
        return {
            **arguments,
            "per_device_train_batch_size": batch // self.steps,
            "gradient_accumulation_steps": arguments.get("gradient_accumulation_steps", 1) * self.steps,
        }
