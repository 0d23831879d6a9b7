"""So many ranks, and what each of them keeps of the model: what can be said before any of them begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from workbench.errors import ConfigurationError, UnavailableError
from workbench.paths import beside
from workbench.recipe import Recipe
from workbench.settings import unknown
from workbench.techniques import Technique

SHARDS: Mapping[str, Any] = beside(__file__, "shards.toml")
REFUSED: Mapping[str, Mapping[str, str]] = beside(__file__, "refused.toml")
NEEDED = {"deepspeed": "deepspeed==0.19.8"}  # what pip installs, of an engine that is not PyTorch's own
MOST = 1024  # ranks: of one training that is predicted


@dataclass(frozen=True)
class Ranks:
    """So many processes, and what each of them keeps of the model.

    Raises:
        ConfigurationError: no such number, or no such way to shard.
    """

    count: int = 1
    shard: str = "none"

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= MOST:
            raise ConfigurationError(f"ranks: {self.count!r:.90} is not a number from 1 to {MOST:,}.")
        if self.shard not in SHARDS:
            raise unknown("shard: there is no", self.shard, SHARDS)

    @property
    def engine(self) -> str:
        return str(SHARDS[self.shard]["engine"])

    @property
    def highest(self) -> int:
        """The rank that needs most. Where weights are whole and gradients cut, it is the last: those of the last layers
        come first, beside most activations."""
        return self.count - 1 if SHARDS[self.shard].get("last_is_highest") else 0

    def check(self, recipe: Recipe) -> None:
        """Raises ConfigurationError for a batch that the ranks cannot share, and techniques that cannot be sharded."""
        shared(recipe.training_arguments(), self.count)
        for technique in recipe.techniques:
            if why := technique.alone or self._refusal(technique):
                cure = "Leave it out." if technique.alone else "Take --shard none, or leave it out."
                raise ConfigurationError(f"ranks: {technique.name} cannot be used here: {why}. {cure}")

    def _refusal(self, technique: Technique) -> str:
        if self.engine == "fsdp":
            return technique.unsharded
        settings = {technique.name}
        for name, value in technique.settings().items():
            settings.add(f"{technique.name}={name}:{value}")
        for name, table in REFUSED.items():
            if name == self.engine or self.shard.startswith(name):
                for refused in sorted(settings & table.keys()):
                    return table[refused]
        return ""

    def require(self) -> None:
        """Raises UnavailableError: the library that makes it so is not installed."""
        if (package := NEEDED.get(self.engine)) and find_spec(self.engine) is None:
            raise UnavailableError(f"shard: {self.shard} needs {self.engine}. Install it with: pip install {package}")


def shared(arguments: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Of one rank the sequences of a micro-batch, no more than one process has, and the micro-batches of a step.

    Raises:
        ConfigurationError: the ranks do not divide the batch.
    """
    size = arguments["per_device_train_batch_size"]
    whole = size * arguments["gradient_accumulation_steps"]
    part, rest = divmod(whole, count)
    if rest:
        raise ConfigurationError(
            f"ranks: {count} cannot share an effective batch of {whole} sequences in equal parts. Take "
            f"{part * count or count} or {(part + 1) * count} sequences, or another number of ranks."
        )
    micro_batch = max(sequences for sequences in range(1, size + 1) if part % sequences == 0)
    return micro_batch, part // micro_batch
