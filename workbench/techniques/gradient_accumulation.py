"""Gradient accumulation: the effective batch is cut into k micro-batches, with one optimizer step for all of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Capability, Stage, Technique, divisors


@dataclass(frozen=True)
class GradientAccumulation(Technique):
    """Activations and logits shrink with the micro-batch; gradients do not, since they are summed in place.

    The Trainer divides by the number of tokens of the whole effective batch, so the gradient is that of the large
    batch up to rounding (Hugging Face, "Fixing gradient accumulation", 2024).
    """

    steps: int = setting(4, "micro-batches per optimizer step", minimum=2)

    stage = Stage.BATCHES
    brings = frozenset({Capability.ACCUMULATION})
    worth_trying = tuple({"steps": 2**power} for power in range(1, 9))
    slower = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        share = 1 / self.steps
        # `object`, because the dataclass is frozen
        object.__setattr__(self, "remaining_shares", {"activations": share, "logits_and_loss": share})

    def training_arguments(self, arguments: Arguments) -> Arguments:
        batch = arguments["per_device_train_batch_size"]
        if batch % self.steps:
            possible = divisors(batch, 2, batch + 1) or "none: use a larger batch"
            raise ConfigurationError(
                f"gradient_accumulation_steps: a batch of {batch} cannot be split into "
                f"{self.steps} equal micro-batches. Possible steps for this batch: {possible}."
            )
        return {
            **arguments,
            "per_device_train_batch_size": batch // self.steps,
            "gradient_accumulation_steps": arguments.get("gradient_accumulation_steps", 1) * self.steps,
        }

    @classmethod
    def find_in(cls, arguments: Arguments, facts: Mapping[str, Any]) -> Technique | None:
        steps = arguments.get("gradient_accumulation_steps", 1)
        return cls(steps) if steps > 1 else None
