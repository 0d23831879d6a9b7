"""The phases of a run's life: what decides them beside the recipe, the peak of each, and how lives are shown."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from workbench.base.categories import format_bytes
from workbench.base.result import Result
from workbench.base.settings import check_settings, parse_settings, separated, setting
from workbench.recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd


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
class Life(Result):
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

    def __str__(self) -> str:
        return life_text(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. It fits if no phase is refused."""
        return {**asdict(self), "recipe": self.recipe.to_dict(), "fits": not self.refused}


def life_table(*lives: Life) -> "pd.DataFrame":
    """One row for each phase; of each life its bytes, and of two the ratio of those on the device."""
    import pandas as pd

    frames = {life.source: pd.DataFrame(map(asdict, life.peaks)).set_index("phase").astype(float) for life in lives}
    if len(lives) == 2:
        first, second = frames.values()
        frames["ratio"] = (first / second).drop(columns="host_bytes")
    return pd.concat(frames, axis=1).dropna(axis=1, how="all")


def life_text(*lives: Life) -> str:
    """The lives of one recipe, predicted or measured, in one table, and the verdict over each."""
    table = life_table(*lives).rename(columns=lambda name: name.removesuffix("_bytes"))
    shown = table.apply(lambda column: column.map("{:.3f}".format if column.name[0] == "ratio" else format_bytes))
    recipe = lives[0].recipe
    head = f"{recipe.label} on {recipe.model}, the whole life of a run"
    return "\n".join([head, "", shown.to_string(na_rep="–"), *map(_verdict, lives)])


def _verdict(life: Life) -> str:
    import psutil

    peak = life.highest
    host_bytes = max(peak.host_bytes for peak in life.peaks)
    how = "predicted, not measured" if life.source.startswith("emulated") else "measured"
    fits = f"NO ({', '.join(life.refused)})" if life.refused else "yes"
    room = f" and about {format_bytes(life.context_bytes)} of context" if life.context_bytes else ""
    if life.capacity_bytes:
        room += f", of {format_bytes(life.capacity_bytes)}"
    return (
        f"\n{life.source} ({how})\n"
        f"  fits   {fits}: {format_bytes(peak.allocated_bytes)} allocated, "
        f"{format_bytes(peak.device_bytes)} reserved in {peak.phase}{room}\n"
        f"  host   at most {format_bytes(host_bytes)}; "
        f"this machine has {format_bytes(psutil.virtual_memory().total)}"
    )
