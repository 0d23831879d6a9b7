"""Everything that a shadow replaces in torch, transformers and accelerate, each with its reason.

What is global is put back at the end of its context: one shadow at a time, in a process where nothing else runs. Beside
this, `ShadowTracker` registers hooks for all modules, and `step.train` repeats the Trainer's loop call by call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import _meta_registrations as meta
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import distributed
from torch.utils._python_dispatch import _disable_current_modes

from workbench.gpus.catalogue import Gpu
from workbench.predict.shadow.attention import CudaAttention
from workbench.predict.shadow.autocast import cuda_autocast

# torch.optim hides the modules of these names
FOREACH_MODULES: tuple[Any, ...] = (torch.utils._foreach_utils, import_module("torch.optim.optimizer"))


# ---- one model, one trainer ----


def make_fake(model: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
    """Every parameter and buffer becomes a fake one on the device; tied ones stay tied.

    Techniques must have been applied before: adapters cannot be put into a model of fake parameters.
    """
    fakes: dict[int, torch.Tensor] = {}
    for module in model.modules():
        # `register_parameter` and `setattr` check what a fake tensor does not pass
        for tensors in cast("tuple[dict[str, torch.Tensor | None], ...]", (module._parameters, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fakes.setdefault(id(tensor), _fake_tensor(tensor, mode, device))
    model.to = lambda *_, **__: model  # type: ignore[method-assign]  # the Trainer moves it; it is there already


def _fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    plain = tensor.detach()
    if plain.device.type == "meta":
        # `mode.from_tensor` would leave it on "meta", which stands for the host here
        fake = mode.fake_tensor_converter.from_meta_and_device(mode, plain, device)
    else:
        fake = mode.from_tensor(plain)
    return torch.nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else fake


def scale_losses(trainer: Any) -> None:
    """Switches on fp16 with loss scaling, which accelerate leaves out where the device is a CPU."""
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = _UnreadScaler("cpu")


def fill_tables() -> None:
    """torchao reads the values that its codes stand for off tensors, once, which must not be fake ones."""
    for bits in (4, 8):
        if module := sys.modules.get(f"torchao.optim.subclass_{bits}bit"):
            module.get_qmap_signed(), module.get_qmap_unsigned()


class _UnreadScaler(torch.amp.GradScaler):
    """Steps always: whether a gradient overflowed is a value, which fake gradients do not have."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


# ---- this process, for any device ----


@contextmanager
def traceable(padding: Callable[[], bool]) -> Iterator[None]:
    """What fake tensors need: they have no values to look at, and are not `torch.Tensor` by type.

    Args:
        padding: whether the batch that the model sees now contains padding.
    """
    from transformers import masking_utils
    from transformers.trainer_pt_utils import EvalLoopContainer

    from workbench.run import trainer

    by_shapes: Callable[..., bool] = masking_utils._ignore_causal_mask_sdpa
    packed: Callable[..., Any] = masking_utils.find_packed_sequence_indices

    def ignore_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is not None and padding():
            return False
        return by_shapes(None, *args, **kwargs)

    def not_packed(position_ids: torch.Tensor) -> None:
        packed(position_ids)  # allocates what it allocates

    with ExitStack() as stack:

        def replaced(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(patch.object(owner, name, new))

        replaced(masking_utils, "_ignore_causal_mask_sdpa", ignore_mask)  # reads whether the mask masks anything
        replaced(masking_utils, "find_packed_sequence_indices", not_packed)  # reads whether a row holds several texts
        for module in FOREACH_MODULES:  # lists the types whose lists of tensors are updated at once
            replaced(module, "_foreach_supported_types", [*module._foreach_supported_types, FakeTensor])
        replaced(import_module("torch.optim.adam"), "_get_value", lambda step: 1.0)  # reads how many steps were taken
        replaced(EvalLoopContainer, "get_arrays", lambda losses: losses.__init__())  # reads the losses
        replaced(trainer, "count_padding", lambda inputs: 0)  # ours; reads the mask, for the record only
        replaced(meta, "_meta_grouped_mm_common", _grouped_product)  # refuses fp32, which kernels take
        replaced(distributed, "_verify_param_shape_across_processes", lambda *_: None)  # reads shapes
        replaced(
            cast("Any", torch.distributed).Reducer, "_rebuild_buckets", lambda _: False
        )  # reads whose gradient came first
        replaced(torch.Tensor, "set_", _on_storage)  # a fake tensor that is set to a storage never lets it go
        yield


def _grouped_product(a: torch.Tensor, b: torch.Tensor, *_: Any, offs: Any = None, **options: Any) -> torch.Tensor:
    """The product of a mixture of experts: as large for any routing."""
    product: torch.Tensor = meta._create_grouped_mm_output_tensor(a, b, offs, options.get("out_dtype"))
    return product


def _on_storage(tensor: Any, storage: torch.UntypedStorage, *place: Any) -> torch.Tensor:
    """In place of a fake tensor that is set to a storage, another one on all of it."""
    if not isinstance(tensor, FakeTensor):
        return torch._C.TensorBase.set_(tensor, storage, *place)
    with _disable_current_modes():
        plain = torch._C.TensorBase.set_(torch.empty(0, dtype=tensor.dtype, device=storage.device), storage)
    mode = tensor.fake_mode
    fake: torch.Tensor = mode.fake_tensor_converter.from_meta_and_device(mode, plain, tensor.fake_device)
    return fake


# ---- this process, for a GPU ----


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[CudaAttention]:
    """Kernels, precisions and optimizer implementations as on this GPU. Yields what attention was asked."""
    attention = CudaAttention(gpu)
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast())  # the CPU's autocast has shorter lists of operations
        stack.enter_context(_native_dropout())
        # a CPU takes other attention kernels, which keep other tensors
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attention))
        for module in FOREACH_MODULES:  # optimizers update lists of tensors at once on a GPU only
            stack.enter_context(patch.object(module, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]))
        yield attention


@contextmanager
def _native_dropout() -> Iterator[None]:
    """CUDA's dropout is one kernel with a mask of one byte per element; the CPU's keeps a mask of floats."""

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or tensor.numel() == 0:
            return tensor
        return torch.native_dropout(tensor, p, train)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", dropout, "AutogradCPU")
        yield
