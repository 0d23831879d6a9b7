"""All that a shadow changes about a model, a Trainer and this process, so that a step runs without values.

Global changes are undone at the end of their context. There is one shadow at a time, in a process where nothing else
runs. Beside this, `ShadowTracker` registers hooks for all modules, and `step.train` repeats the Trainer's loop call by
call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from workbench.base.patches import replace_attribute
from workbench.base.patches import torch as torch_patches
from workbench.base.patches import transformers as transformers_patches
from workbench.gpus.catalogue import Gpu
from workbench.prediction.rows import replace_tensors
from workbench.prediction.shadow.attention import CudaAttention
from workbench.prediction.shadow.autocast import cuda_autocast
from workbench.training import trainer

# ---- one model, one trainer ----


def make_fake(model: PreTrainedModel, mode: FakeTensorMode, device: torch.device) -> None:
    """Replace every parameter and buffer by a fake tensor on the device."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if plain.device.type == "meta":
            # `mode.from_tensor` would leave a tensor on "meta", which stands for the host here.
            return mode.fake_tensor_converter.from_meta_and_device(mode, plain, device)
        return mode.from_tensor(plain)

    replace_tensors(model, fake)
    cast("Any", model).to = lambda *_, **__: model  # the Trainer would move the model, which is on the device already


def scale_losses(metered_trainer: Any) -> None:
    """Switch on fp16 with loss scaling, which accelerate leaves out where the device is a CPU."""
    metered_trainer.accelerator.native_amp = True
    metered_trainer.accelerator.scaler = _UnreadScaler("cpu")


class _UnreadScaler(torch.amp.GradScaler):
    """A scaler that always steps: whether a gradient overflowed is a value, which fake gradients do not have."""

    def _maybe_opt_step(
        self,
        optimizer: Any,
        optimizer_state: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return optimizer.step(*args, **kwargs)


# ---- this process, for any device ----


@contextmanager
def traceable(has_padding: Callable[[], bool]) -> Iterator[None]:
    """Let libraries work with fake tensors, which have no values to look at and are not `torch.Tensor` by type.

    Args:
        has_padding: returns whether the batch that the model sees now contains padding.
    """
    with (
        transformers_patches.read_no_values(has_padding),
        torch_patches.update_lists_at_once(FakeTensor),
        torch_patches.read_no_values_in_optimizers_and_ddp(),
        torch_patches.allow_grouped_products_in_any_type(),
        torch_patches.let_storages_go(),
        # The workbench's own Trainer reads the mask, for the record only.
        replace_attribute(trainer, "count_padding", lambda inputs: 0),
    ):
        yield


# ---- this process, for a GPU ----


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[CudaAttention]:
    """Choose kernels, precisions and optimizer implementations as this GPU would.

    Yields the attention, which keeps the questions that it was asked.
    """
    attention = CudaAttention(gpu)
    with (
        cuda_autocast(),  # the CPU's autocast has shorter lists of operations
        torch_patches.drop_out_in_one_kernel(),
        torch_patches.attend_by(attention),
        torch_patches.update_lists_at_once(None, "cuda", "cpu"),  # libraries update lists at once on a GPU alone
    ):
        yield attention
