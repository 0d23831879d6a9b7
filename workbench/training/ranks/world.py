"""The process group of a run's ranks: how they find each other, and exchange objects."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from workbench.base.device import Device
from workbench.base.errors import explain_errors
from workbench.training.world import World

JOIN_S = 300.0  # seconds for which ranks wait for each other at the beginning
# The backends of the process group, with GPUs and without.
GPU_BACKENDS = "cpu:gloo,cuda:nccl"
CPU_BACKEND = "gloo"
Value = TypeVar("Value")


def join(device: str | None, shard: str) -> World:
    """Wait for the other ranks, and return the world with this process as one of them. It uses a GPU of its own.

    Raises:
        ConfigurationError: not all came in time, or the port is taken.
    """
    if torch.cuda.is_available() and device in (None, "cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    world = World(Device.find(device), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), shard)
    if world.device.kind == "cpu":
        # accelerate would take `cpu:0`, another device to PyTorch, and copy every batch.
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if not dist.is_initialized():
        with explain_errors(
            f"ranks: rank {world.rank} did not find all others within {JOIN_S:g} s", "Start the run again."
        ):
            backend = GPU_BACKENDS if world.device.kind == "cuda" else CPU_BACKEND
            dist.init_process_group(backend, timeout=timedelta(seconds=JOIN_S))
    return world


def broadcast_from_first(make: Callable[[], Value]) -> Value:
    """Return on all ranks what the function returns on the first one, or raise what it raises there."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return cast("Value", answer[0])


def gather_from_all(part: Value) -> list[Value]:
    """Return what each rank has handed in, in their order, on all of them."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return parts
