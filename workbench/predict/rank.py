"""One rank of several in one process, which plays the first of them: the others are not there, nor what they send."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

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
        stack.enter_context(patch.dict(os.environ, variables))
        dist.init_process_group("fake", store=FakeStore(), rank=ranks.highest, world_size=ranks.count)
        if ranks.engine == "deepspeed":
            from deepspeed.comm.torch import TorchBackend

            set_accelerator(device.type)
            send = keeping(TorchBackend.all_gather_into_tensor)
            stack.enter_context(patch.object(TorchBackend, "all_gather_into_tensor", send))
        try:
            yield
        finally:
            with suppress(RuntimeError):  # of one weight that was being gathered as memory ran out
                let_go()
            forget()
            dist.destroy_process_group()


class Sending:
    """A message on its way, which keeps what it sends until it is waited for, as NCCL's do (PyTorch's `TensorShelf` in
    ProcessGroupNCCL.hpp). For DeepSpeed that is a copy, on the GPU, of weights that wait in host memory.
    """

    def __init__(self, work: dist.Work, sent: torch.Tensor) -> None:
        self._work = work
        self._sent = [sent]

    def wait(self) -> None:
        self._work.wait()
        self._sent.clear()


def keeping(send: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's sending of a tensor. A fake message would let go of it at once, and gloo's when it has come."""

    @wraps(send)
    def sent(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
        work = send(self, output_tensor, input_tensor, **kwargs)
        return Sending(work, input_tensor) if kwargs.get("async_op") else work

    return sent


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
