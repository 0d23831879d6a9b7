"""One rank of several, played by one process: the other ranks do not exist, and what they would send is not sent."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
import torch.distributed as dist

from workbench.base.patches import change_environment
from workbench.base.patches.deepspeed import keep_messages_until_waited_for
from workbench.training.ranks.shards import Ranks
from workbench.training.ranks.zero import close_engines, release_gathered, set_accelerator

# Variables of the environment in which torchrun tells PyTorch and accelerate which rank a process is.
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def as_rank(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """Let this process be the rank that needs most memory of those that share a batch; None is a process alone.

    PyTorch's fake process group takes every message and answers at once. accelerate reads the environment.
    """
    if ranks is None:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    variables = dict.fromkeys(LAUNCHERS, "0")
    variables["WORLD_SIZE"] = str(ranks.count)
    variables["ACCELERATE_TORCH_DEVICE"] = str(device)  # for a CPU, accelerate alone would take cpu:0
    with ExitStack() as stack:
        stack.enter_context(change_environment(variables))
        dist.init_process_group("fake", store=FakeStore(), rank=ranks.highest, world_size=ranks.count)
        if ranks.engine == "deepspeed":
            set_accelerator(device.type)
            stack.enter_context(keep_messages_until_waited_for())
        try:
            yield
        finally:
            with suppress(RuntimeError):  # a weight that was being gathered as memory ran out raises here
                release_gathered()
            close_engines()
            dist.destroy_process_group()
