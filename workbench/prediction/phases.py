"""The phases of a run's life: what decides them beside the recipe, and the peak of each."""

from dataclasses import asdict, dataclass
from typing import Any

from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.base.settings import check_settings, parse_settings, setting, split_settings
from workbench.recipe import Recipe


@dataclass(frozen=True)
class Habits:
    """The settings of a user's evaluation and generation, which no recipe has. Their names are transformers' own.

    Raises:
        ConfigurationError: a value out of range.
    """

    prediction_loss_only: bool = setting(True, "false keeps the logits of every held-out row, as compute_metrics asks")
    eval_accumulation_steps: int | None = setting(None, "batches after which kept logits go to the host", minimum=1)
    held_out_rows: int | None = setting(None, "rows to evaluate; none: as in a run", minimum=1, maximum=2**20)
    max_new_tokens: int = setting(32, "tokens to generate, the last ones of a sequence", minimum=1)
    use_cache: bool = setting(True, "generate with a key-value cache")

    def __post_init__(self) -> None:
        check_settings(self, "life")

    @classmethod
    def parse(cls, text: str) -> "Habits":
        """Read habits from `name:value,name:value`, the form in which a technique's settings are typed."""
        return cls(**parse_settings(cls, split_settings(text, "life"), "life"))


@dataclass(frozen=True)
class Peak:
    """The most memory of one phase. `host_bytes` are those of tensors in the host's memory."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Life(Result):
    """The peaks of a recipe's phases, in their order. A recipe that cannot be resumed has no checkpoint among them.

    `refused` names the phases that need more than the card has: their peaks are those of a card like it with enough.
    """

    recipe: Recipe
    source: str
    habits: Habits
    peaks: tuple[Peak, ...]
    capacity_bytes: int
    context_bytes: int
    refused: tuple[str, ...]

    @property
    def highest(self) -> Peak:
        """The phase that needs most of the device."""
        return max(self.peaks, key=lambda peak: peak.reserved_bytes)

    def __str__(self) -> str:
        """Show a line for each phase, and the verdict."""
        import psutil

        lines = [
            f"{self.recipe.label} on {self.recipe.model}, the whole life of a run",
            "",
            f"{'phase':12}{'allocated':>12}{'reserved':>12}{'host':>12}",
        ]
        for peak in self.peaks:
            device = f"{format_bytes(peak.allocated_bytes):>12}{format_bytes(peak.reserved_bytes):>12}"
            lines.append(f"{peak.phase:12}{device}{format_bytes(peak.host_bytes):>12}")
        most = self.highest
        host_bytes = max(peak.host_bytes for peak in self.peaks)
        fits = "yes"
        if self.refused:
            fits = f"NO ({', '.join(self.refused)})"
        lines += [
            "",
            f"{self.source} (predicted, not measured)",
            f"  fits   {fits}: {format_bytes(most.allocated_bytes)} allocated, "
            f"{format_bytes(most.reserved_bytes)} reserved in {most.phase} and about "
            f"{format_bytes(self.context_bytes)} of context, "
            f"of {format_bytes(self.capacity_bytes)}",
            f"  host   at most {format_bytes(host_bytes)}; this machine has "
            f"{format_bytes(psutil.virtual_memory().total)}",
        ]
        if "evaluate" in self.refused:
            cure = "a recipe with evaluation_batch_size=1"
            if not self.habits.prediction_loss_only:
                cure = "prediction_loss_only:true, or eval_accumulation_steps:1"
            lines += ["", f"For the evaluation try {cure}, and predict again."]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary. The run fits if no phase is refused."""
        return {**asdict(self), "recipe": self.recipe.to_dict(), "fits": not self.refused}
