"""What is replaced in DeepSpeed. Its names were read in DeepSpeed 0.19.8, the version that the workbench asks for."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from workbench.base.patches import replaced


def on_device(device_kind: str) -> None:
    """DeepSpeed for this kind of device, without kernels of its own, which it would compile for minutes.

    accelerate may have imported it before: then it has chosen a device already, and chooses anew.
    """
    os.environ["DS_ACCELERATOR"] = device_kind
    from deepspeed import ops
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = None
    ops.__compatible_ops__ = {}  # of its kernels those that could be compiled here


def believe_own_lists() -> None:
    """Whether all ranks gather the same weights DeepSpeed asks tensors. On a card in software these have no values, so
    that a rank takes its own list of weights for that of all."""
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = own_list
    utils.assert_lst_len_same_as_other_ranks = not_compared


def own_list(numbers: list[int]) -> list[int]:
    return numbers


def not_compared(numbers: list[int]) -> None:
    pass


def tell_of_steps(engine: Any, before_step: Callable[[], None], after_change: Callable[[], None]) -> None:
    """Let an engine say when it steps, and when it has gathered weights or sent gradients on their way.

    All of that it does within its backward pass, and tells nobody: it has no callbacks.
    """
    optimizer = engine.optimizer
    call_beside(engine, "step", before=before_step)
    call_beside(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", after=after_change)
    # it gathers weights, where they are cut
    offload = getattr(optimizer, "parameter_offload", None)
    if offload:
        call_beside(offload.get_param_coordinator(), "fetch_sub_module", after=after_change)


def do_nothing() -> None:
    pass


def call_beside(
    owner: Any, name: str, before: Callable[[], None] = do_nothing, after: Callable[[], None] = do_nothing
) -> None:
    """From now on an object's method calls these, too."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(owner, name, called)


def take_apart(engine: Any) -> None:
    """An engine with its model, and the process group that it knows: the process would keep them until it ends.

    Engine, optimizers and parameters hold each other where the garbage collector does not look, so all are emptied.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.utils import groups

    engine.destroy()
    parameters = list(engine.module.parameters())
    optimizer = engine.optimizer
    for thing in (*parameters, optimizer.optimizer, optimizer, engine):
        vars(thing).clear()
    for parameter in parameters:
        parameter.data = torch.empty(0)
    FWD_MODULE_STACK.clear()
    comm.cdb = None  # the process group
    groups._release_process_group_references(group=None)


@contextmanager
def messages_kept_until_waited_for() -> Iterator[None]:
    """What a rank sends of its weights is kept until it is waited for, as NCCL does.

    A message of a process group that only plays ranks would let go of it at once, and gloo's when it has come.
    """
    from deepspeed.comm.torch import TorchBackend

    with replaced(TorchBackend, "all_gather_into_tensor", keeping(TorchBackend.all_gather_into_tensor)):
        yield


def keeping(send: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's sending of a tensor, which keeps it on its way."""

    @wraps(send)
    def sent(self: Any, output_tensor: Any, input_tensor: Any, **kwargs: Any) -> Any:
        work = send(self, output_tensor, input_tensor, **kwargs)
        return Sending(work, input_tensor) if kwargs.get("async_op") else work

    return sent


class Sending:
    """A message on its way, which keeps what it sends until it is waited for, as NCCL's do (PyTorch's `TensorShelf` in
    ProcessGroupNCCL.hpp). For DeepSpeed that is a copy, on the GPU, of weights that wait in host memory.
    """

    def __init__(self, work: Any, sent: torch.Tensor) -> None:
        self._work = work
        self._sent = [sent]

    def wait(self) -> None:
        self._work.wait()
        self._sent.clear()
