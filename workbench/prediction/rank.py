"""One rank of several in one process, which plays the first of them: the others are not there, nor what they send."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from workbench.base.patches import changed_environment
from workbench.base.patches.deepspeed import messages_kept_until_waited_for
from workbench.ranks import LAUNCHERS
from workbench.ranks.shard import fully_sharded, mesh_of
from workbench.ranks.shards import Ranks
from workbench.ranks.zero import forget, let_go, partitioned, set_accelerator

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

    variables = dict.fromkeys(LAUNCHERS, "0")
    variables["WORLD_SIZE"] = str(ranks.count)
    variables["ACCELERATE_TORCH_DEVICE"] = str(device)  # it would take cpu:0 for a CPU
    with ExitStack() as stack:
        stack.enter_context(changed_environment(variables))
        dist.init_process_group("fake", store=FakeStore(), rank=ranks.highest, world_size=ranks.count)
        if ranks.engine == "deepspeed":
            set_accelerator(device.type)
            stack.enter_context(messages_kept_until_waited_for())
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of one weight that was being gathered as memory ran out
                let_go()
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
