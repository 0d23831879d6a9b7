"""One rank of several in one process, which plays the first of them: the others are not there, nor what they send."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from workbench.ranks import LAUNCHERS
from workbench.ranks.shard import fully_sharded, mesh_of
from workbench.ranks.shards import Ranks
from workbench.ranks.zero import forget, partitioned, set_accelerator

PLAIN = nullcontext()


@contextmanager
def as_first(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """This process as the first of so many ranks; None: as a process alone.

    PyTorch's fake process group takes every message and answers at once. accelerate asks the environment.
    """
    if ranks is None:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    told = {"WORLD_SIZE": str(ranks.count), "ACCELERATE_TORCH_DEVICE": str(device)}  # it would take cpu:0 for a CPU
    with patch.dict(os.environ, {**dict.fromkeys(LAUNCHERS, "0"), **told}):
        dist.init_process_group("fake", store=FakeStore(), rank=ranks.highest, world_size=ranks.count)
        if ranks.engine == "deepspeed":
            set_accelerator(device.type)
        try:
            yield
        finally:
            forget()
            dist.destroy_process_group()


def part_of(
    model: PreTrainedModel, ranks: Ranks | None, device_kind: str, mode: AbstractContextManager[Any] = PLAIN
) -> PreTrainedModel:
    """What the first rank keeps of a model.

    Args:
        mode: in which it is cut, where its parameters are fake.
    """
    if ranks is None or ranks.engine == "ddp":
        return model
    if ranks.engine == "deepspeed":
        with mode:
            return partitioned(model, ranks.shard).to(device_kind)  # type: ignore[arg-type, no-any-return]
    mesh = mesh_of(device_kind, ranks.count)  # which reads values of its own
    with mode:
        return fully_sharded(model, ranks.shard, mesh)
