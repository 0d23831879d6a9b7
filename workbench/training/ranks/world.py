"""The ranks of a run in their processes: they come together, and tell each other."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from workbench.base.device import Device
from workbench.base.errors import explained
from workbench.training.world import World

JOIN_S = 300.0  # how long ranks wait for each other at the beginning
GPUS = "cpu:gloo,cuda:nccl"  # what carries their messages
HOSTS = "gloo"
Given = TypeVar("Given")


def join(device: str | None, shard: str) -> World:
    """This process as one of several ranks: it waits for the others, and sees its own GPU.

    Raises:
        ConfigurationError: not all came in time, or the port is taken.
    """
    if torch.cuda.is_available() and device in (None, "cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    world = World(Device.find(device), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), shard)
    if world.device.kind == "cpu":
        # not cpu:0, another device, to which every batch would be copied
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if not dist.is_initialized():
        with explained(f"ranks: rank {world.rank} did not find all others within {JOIN_S:g} s", "Start the run again."):
            backend = HOSTS
            if world.device.kind == "cuda":
                backend = GPUS
            dist.init_process_group(backend, timeout=timedelta(seconds=JOIN_S))
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
