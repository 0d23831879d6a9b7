"""The number of ranks, and what each keeps of the model: all that can be checked before any of them is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.paths import read_beside
from workbench.base.settings import unknown_name_error
from workbench.recipe import Recipe

SHARDS: Mapping[str, Any] = read_beside(__file__, "shards.toml")
MOST_RANKS = 1024  # a prediction takes any number up to it


@dataclass(frozen=True)
class Ranks:
    """A number of processes, and what each of them keeps of the model.

    Attributes:
        count: how many there are.
        shard: what each keeps, a name of `shards.toml`.

    Raises:
        ConfigurationError: no such number, or no such way to shard.
    """

    count: int = 1
    shard: str = "none"

    def __post_init__(self) -> None:
        if type(self.count) is not int or not 1 <= self.count <= MOST_RANKS:
            raise ConfigurationError(f"ranks: {self.count!r:.90} is not a number from 1 to {MOST_RANKS:,}.")
        if self.shard not in SHARDS:
            raise unknown_name_error("shard: there is no", self.shard, SHARDS)

    @property
    def engine(self) -> str:
        return str(SHARDS[self.shard]["engine"])

    @property
    def highest(self) -> int:
        """The rank that needs most memory. Where weights are whole and gradients sharded, it is the last: its
        gradients, those of the last layers, come first in the backward pass, when most activations are still
        there."""
        if SHARDS[self.shard].get("last_is_highest"):
            return self.count - 1
        return 0

    def check(
        self,
        recipe: Recipe,
        *,
        checkpoint_every: int | None = None,
        resume: bool = False,
        **_: Any,
    ) -> None:
        """Refuse what a run on these ranks cannot do.

        Raises:
            ConfigurationError: a batch that the ranks cannot share, a technique that cannot be sharded, or checkpoints.
        """
        split_batch(recipe.training_arguments(), self.count)
        for technique in recipe.techniques:
            refused = f"ranks: {technique.name} cannot be used here"
            if technique.why_not_on_ranks:
                raise ConfigurationError(f"{refused}: {technique.why_not_on_ranks}. Leave it out.")
            for name, reason in technique.why_not_on_shards.items():
                if name == self.engine or self.shard.startswith(name):
                    raise ConfigurationError(f"{refused}: {reason}. Take --shard none, or leave it out.")
        if resume or checkpoint_every is not None:
            raise ConfigurationError(
                "checkpoint_every: a run on several ranks writes no checkpoints, "
                "nor goes on with one. Leave out checkpoint_every and resume, "
                "or write the script, which leaves checkpoints to the Trainer."
            )


def ranks_for(recipe: Recipe, count: int | None, shard: str, **options: Any) -> Ranks:
    """Return ranks on this machine that can run a recipe, with these options of a run.

    Raises:
        ConfigurationError: nothing says how many there are, or as `Ranks` and its `check`.
        UnavailableError: the library that shards in this way is not installed.
    """
    if count is None:
        raise ConfigurationError("shard: among how many ranks? Add --ranks 2.")
    ranks = Ranks(count, shard)
    ranks.check(recipe, **options)
    if ranks.engine == "deepspeed" and find_spec("deepspeed") is None:
        raise UnavailableError(f"shard: {shard} needs deepspeed. Install it with: pip install deepspeed==0.19.8")
    return ranks


def split_batch(arguments: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return a rank's (sequences of a micro-batch, micro-batches of a step).

    A micro-batch has no more sequences than that of one process alone.

    Args:
        arguments: those of `TrainingArguments` for one process.
        count: how many ranks share the batch.

    Raises:
        ConfigurationError: the ranks do not divide the batch.
    """
    size = arguments["per_device_train_batch_size"]
    whole = size * arguments["gradient_accumulation_steps"]
    part, rest = divmod(whole, count)
    if rest:
        raise ConfigurationError(
            f"ranks: {count} cannot share an effective batch of {whole} sequences in equal parts. "
            f"Take {part * count or count} or {(part + 1) * count} sequences, "
            "or another number of ranks."
        )
    micro_batch = max(sequences for sequences in range(1, size + 1) if part % sequences == 0)
    return micro_batch, part // micro_batch
