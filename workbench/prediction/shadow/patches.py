"""All that a shadow changes about a model, a Trainer and this process, so that a step runs without values.

What is global is put back at the end of its context: one shadow at a time, in a process where nothing else runs. Beside
this, `ShadowTracker` registers hooks for all modules, and `step.train` repeats the Trainer's loop call by call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from workbench.base.patches import replaced
from workbench.base.patches import torch as torch_patches
from workbench.base.patches import transformers as transformers_patches
from workbench.gpus.catalogue import Gpu
from workbench.prediction.rows import give_tensors
from workbench.prediction.shadow.attention import CudaAttention
from workbench.prediction.shadow.autocast import cuda_autocast
from workbench.training import trainer

# ---- one model, one trainer ----


def make_fake(model: PreTrainedModel, mode: FakeTensorMode, device: torch.device) -> None:
    """Every parameter and buffer becomes a fake one on the device."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if plain.device.type == "meta":
            # `mode.from_tensor` would leave it on "meta", which stands for the host here
            return mode.fake_tensor_converter.from_meta_and_device(mode, plain, device)
        return mode.from_tensor(plain)

    give_tensors(model, fake)
    cast("Any", model).to = lambda *_, **__: model  # the Trainer moves it; it is there already


def scale_losses(assembled: Any) -> None:
    """Switches on fp16 with loss scaling, which accelerate leaves out where the device is a CPU."""
    assembled.accelerator.native_amp = True
    assembled.accelerator.scaler = _UnreadScaler("cpu")


class _UnreadScaler(torch.amp.GradScaler):
    """Steps always: whether a gradient overflowed is a value, which fake gradients do not have."""

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
    """What fake tensors need: they have no values to look at, and are not `torch.Tensor` by type.

    Args:
        has_padding: whether the batch that the model sees now contains padding.
    """
    with (
        transformers_patches.values_unread(has_padding),
        torch_patches.lists_updated_at_once(FakeTensor),
        torch_patches.optimizers_and_ddp_read_no_values(),
        torch_patches.grouped_products_in_any_type(),
        torch_patches.storages_let_go(),
        # ours; reads the mask, for the record only
        replaced(trainer, "count_padding", lambda inputs: 0),
    ):
        yield


# ---- this process, for a GPU ----


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[CudaAttention]:
    """Kernels, precisions and optimizer implementations as on this GPU. Yields what attention was asked."""
    attention = CudaAttention(gpu)
    with (
        cuda_autocast(),  # the CPU's autocast has shorter lists of operations
        torch_patches.dropout_in_one_kernel(),
        torch_patches.attention_by(attention),
        torch_patches.lists_updated_at_once(None, "cuda", "cpu"),  # which happens on a GPU only
    ):
        yield attention
