"""The phases of a run's life: what decides them beside the recipe, and the peak of each."""

from dataclasses import asdict, dataclass
from typing import Any

from workbench.recipe import Recipe
from workbench.settings import check_settings, parse_settings, separated, setting


@dataclass(frozen=True)
class Habits:
    """What a user's evaluation and generation do beside the recipe; the names are transformers' own.

    Raises:
        ConfigurationError: a value out of range.
    """

    prediction_loss_only: bool = setting(True, "false keeps the logits of every held-out row, as compute_metrics asks")
    eval_accumulation_steps: int | None = setting(None, "batches after which kept logits go to the host", minimum=1)
    held_out_rows: int | None = setting(
        None, "rows to evaluate; none: as many as `run` takes", minimum=1, maximum=2**20
    )
    max_new_tokens: int = setting(32, "tokens to generate, the last ones of a sequence", minimum=1)
    use_cache: bool = setting(True, "generate with a key-value cache")

    def __post_init__(self) -> None:
        check_settings(self, "life")

    @classmethod
    def parse(cls, text: str) -> "Habits":
        """From `name:value,name:value`, as a technique's settings are typed."""
        return cls(**parse_settings(cls, separated(text, "life"), "life"))


@dataclass(frozen=True)
class Peak:
    """The most in one phase, in bytes; where a device has no allocator, nothing is reserved."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int | None
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        """What the device must give."""
        return self.reserved_bytes or self.allocated_bytes


@dataclass(frozen=True)
class Life:
    """The peaks of a recipe's phases, in their order. Without checkpoint and resume, where the recipe cannot do them.

    Of a prediction, `host_bytes` are those of the tensors that lie in host memory; of a measurement, by how much the
    process's resident memory had grown since before the load, below nothing where a process gave back what it had
    before. `refused` are the phases that ask for more than there is: their predicted peaks are those of a card like it
    that has enough.
    """

    recipe: Recipe
    source: str
    habits: Habits
    peaks: tuple[Peak, ...]
    capacity_bytes: int | None
    context_bytes: int
    refused: tuple[str, ...]

    @property
    def highest(self) -> Peak:
        """The phase that needs most of the device."""
        return max(self.peaks, key=lambda peak: peak.device_bytes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. It fits if no phase is refused."""
        return {**asdict(self), "recipe": self.recipe.to_dict(), "fits": not self.refused}
