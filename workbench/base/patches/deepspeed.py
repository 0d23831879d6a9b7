"""Patches of DeepSpeed. The names were read in DeepSpeed 0.19.8, the version that the workbench asks for."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from workbench.base.patches import replace_attribute


def prepare_for_device(device_kind: str) -> None:
    """Prepare DeepSpeed for this kind of device, without kernels of its own, which it would compile for minutes.

    accelerate may have imported DeepSpeed before: then it has chosen a device already, and chooses anew.
    """
    os.environ["DS_ACCELERATOR"] = device_kind
    from deepspeed import ops
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = None  # no device is chosen yet
    ops.__compatible_ops__ = {}  # none of its kernels can be compiled here


def believe_own_lists() -> None:
    """Let a rank take its own list of weights for the list of all ranks.

    DeepSpeed compares the lists by tensors, and those of an emulated GPU have no values.
    """
    from deepspeed.runtime.zero import utils

    utils.get_lst_from_rank0 = keep_own_list
    utils.assert_lst_len_same_as_other_ranks = compare_nothing


def keep_own_list(numbers: list[int]) -> list[int]:
    return numbers


def compare_nothing(numbers: list[int]) -> None:
    pass


def hook_steps(engine: Any, before_step: Callable[[], None], after_change: Callable[[], None]) -> None:
    """Let an engine call functions: one before it steps, one after it has gathered weights or sent gradients.

    An engine has no callbacks, and does all of that within its backward pass.
    """
    optimizer = engine.optimizer
    wrap_method(engine, "step", before=before_step)
    wrap_method(optimizer, "reduce_independent_p_g_buckets_and_remove_grads", after=after_change)
    # An engine that cuts the weights has this attribute, and gathers them.
    offload = getattr(optimizer, "parameter_offload", None)
    if offload:
        wrap_method(offload.get_param_coordinator(), "fetch_sub_module", after=after_change)


def do_nothing() -> None:
    pass


def wrap_method(
    owner: Any, name: str, before: Callable[[], None] = do_nothing, after: Callable[[], None] = do_nothing
) -> None:
    """Replace an object's method by one that calls `before`, the method and `after`."""
    method = getattr(owner, name)

    def call_all(*args: Any, **kwargs: Any) -> Any:
        before()
        result = method(*args, **kwargs)
        after()
        return result

    setattr(owner, name, call_all)


def free_engine(engine: Any) -> None:
    """Free an engine with its model, and the process group that it knows: the process would keep them until it ends.

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
    comm.cdb = None  # `cdb` is the process group
    groups._release_process_group_references(group=None)


@contextmanager
def keep_messages_until_waited_for() -> Iterator[None]:
    """Let a rank keep the weights that it sends until somebody waits for the message, as NCCL does.

    The message of a fake process group would free them at once, and one of gloo when it has arrived.
    """
    from deepspeed.comm.torch import TorchBackend

    send = keep_what_is_sent(TorchBackend.all_gather_into_tensor)
    with replace_attribute(TorchBackend, "all_gather_into_tensor", send):
        yield


def keep_what_is_sent(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap DeepSpeed's function that sends a tensor, so that the tensor lives as long as the message is on its way."""

    @wraps(send)
    def send_and_keep(self: Any, output_tensor: Any, input_tensor: Any, **kwargs: Any) -> Any:
        work = send(self, output_tensor, input_tensor, **kwargs)
        return Sending(work, input_tensor) if kwargs.get("async_op") else work

    return send_and_keep


class Sending:
    """A message on its way, which keeps the tensor that it sends until somebody waits for it, as a message of NCCL does
    (PyTorch's `TensorShelf` in ProcessGroupNCCL.hpp). In DeepSpeed the tensor is a copy, on the GPU, of weights that
    are stored in host memory.
    """

    def __init__(self, work: Any, sent: torch.Tensor) -> None:
        self._work = work
        self._sent = [sent]

    def wait(self) -> None:
        self._work.wait()
        self._sent.clear()
