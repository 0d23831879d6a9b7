"""The ranks of a run: how many, what each of them keeps, and that they come together and agree."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from workbench.errors import ConfigurationError, UnavailableError, explained
from workbench.paths import beside
from workbench.recipe import Recipe
from workbench.run.world import ACCELERATES, World
from workbench.settings import unknown
from workbench.techniques import Technique

SHARDS: Mapping[str, Any] = beside(__file__, "shards.toml")
REFUSED: Mapping[str, Mapping[str, str]] = beside(__file__, "refused.toml")
NEEDED = {"deepspeed": "deepspeed==0.19.8"}  # what pip installs, of an engine that is not PyTorch's own
MOST = 1024  # ranks: of one training that is predicted
TIMEOUT = "WORKBENCH_JOIN_TIMEOUT"  # in seconds: how long ranks wait for each other at the beginning
GPUS, HOSTS = "cpu:gloo,cuda:nccl", "gloo"  # what carries their messages
Given = TypeVar("Given")


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
        given = {technique.name, *(f"{technique.name}={name}:{value}" for name, value in technique.settings().items())}
        known = [table for name, table in REFUSED.items() if name == self.engine or self.shard.startswith(name)]
        return next((table[name] for table in known for name in sorted(given & table.keys())), "")

    def require(self) -> None:
        """Raises UnavailableError: the library that makes it so is not installed."""
        if (package := NEEDED.get(self.engine)) and find_spec(self.engine) is None:
            raise UnavailableError(f"shard: {self.shard} needs {self.engine}. Install it with: pip install {package}")


def shared(arguments: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Of one rank the sequences of a micro-batch, no more than one process has, and the micro-batches of a step.

    Raises:
        ConfigurationError: the ranks do not divide the batch.
    """
    size, summed = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    each, rest = divmod(size * summed, count)
    if rest:
        raise ConfigurationError(
            f"ranks: {count} cannot share an effective batch of {size * summed} sequences in equal parts. Take "
            f"{each * count or count} or {(each + 1) * count} sequences, or another number of ranks."
        )
    micro_batch = max(sequences for sequences in range(1, size + 1) if each % sequences == 0)
    return micro_batch, each // micro_batch


def refuse_settings() -> None:
    """Raises ConfigurationError for what `accelerate launch` would change and no record would show."""
    kept = {"ACCELERATE_USE_CPU"}
    for name, value in sorted(os.environ.items()):
        if name.startswith(ACCELERATES) and name not in kept and value.lower() not in ("no", "false", "0", ""):
            raise ConfigurationError(
                f"ranks: {name}={value} in the environment is a setting of accelerate's own, and the record would not "
                "show it. Say it with --shard and --technique, and take accelerate's plain configuration."
            )


def join(device: str | None, shard: str) -> World:
    """This process as one of the ranks that torchrun started: it waits for the others, and sees its own GPU.

    Raises:
        ConfigurationError: not all came in time, or the port is taken.
    """
    if torch.cuda.is_available() and device in (None, "cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    rank, count = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    world = replace(World.find(device), rank=rank, world_size=count, shard=shard)
    seconds = float(os.environ.get(TIMEOUT, 300))
    if not dist.is_initialized():
        cure = (
            f"All {world.world_size} ranks must be started, with the same MASTER_ADDR, and a MASTER_PORT that is free."
        )
        with explained(f"ranks: rank {world.rank} did not find all others within {seconds:g} s", cure):
            backend = GPUS if world.device_kind == "cuda" else HOSTS
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return world


def from_first(made: Callable[[], Given]) -> Given:
    """What the first rank makes, on all of them; or what it raises."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = made()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast("Given", answer[0])


def from_all(part: Given) -> list[Given]:
    """What every rank has, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, part)
    return found


def agree(facts: Mapping[str, Any]) -> None:
    """Raises ConfigurationError, on every rank alike, where one has another value than the first."""
    found = from_all(dict(facts))
    for rank, its in enumerate(found):
        for name, value in found[0].items():
            if its[name] != value:
                raise ConfigurationError(
                    f"ranks: rank {rank} has another {name} than rank 0: {its[name]!r:.200}, not {value!r:.200}. Start "
                    "all of them with the same command, in equal environments."
                )
