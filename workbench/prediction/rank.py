"""One rank of several in one process, which plays it: the others are not there, nor what they send."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
import torch.distributed as dist

from workbench.base.patches import changed_environment
from workbench.base.patches.deepspeed import messages_kept_until_waited_for
from workbench.training.ranks.shards import Ranks
from workbench.training.ranks.zero import forget, let_go, set_accelerator

# what PyTorch and accelerate ask for
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def as_rank(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """This process as that of so many ranks which needs most; None: as a process alone.

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
