"""The ranks of a run in their processes: they come together, and agree."""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from workbench.base.errors import ConfigurationError, explained
from workbench.measure.device import Device
from workbench.training.world import ACCELERATES, World

TIMEOUT = "WORKBENCH_JOIN_TIMEOUT"  # in seconds: how long ranks wait for each other at the beginning
GPUS = "cpu:gloo,cuda:nccl"  # what carries their messages
HOSTS = "gloo"
Given = TypeVar("Given")


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
    rank = int(os.environ.get("RANK", "0"))
    count = int(os.environ.get("WORLD_SIZE", "0"))
    world = World(Device.find(device), rank, count, shard)
    if world.device.kind == "cpu":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # not cpu:0, another device, to which every batch would be copied
    seconds = float(os.environ.get(TIMEOUT, 300))
    if not dist.is_initialized():
        cure = (
            f"All {world.world_size} ranks must be started, with the same MASTER_ADDR, and a MASTER_PORT that is free."
        )
        with explained(f"ranks: rank {world.rank} did not find all others within {seconds:g} s", cure):
            backend = GPUS if world.device.kind == "cuda" else HOSTS
            dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    return world


def from_first(make: Callable[[], Given]) -> Given:
    """What the first rank makes, on all of them; or what it raises."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast("Given", answer[0])


def from_all(part: Given) -> list[Given]:
    """What every rank has, in their order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return parts


def agree(facts: Mapping[str, Any]) -> None:
    """Raises ConfigurationError, on every rank alike, where one has another value than the first."""
    ranks = from_all(dict(facts))
    for rank, theirs in enumerate(ranks):
        for name, value in ranks[0].items():
            if theirs[name] != value:
                raise ConfigurationError(
                    f"ranks: rank {rank} has another {name} than rank 0: {theirs[name]!r:.200}, not {value!r:.200}. "
                    "Start all of them with the same command, in equal environments."
                )
