"""Makes the libraries of this process choose on a CPU what they choose on a GPU.

Each of these is a patch of something global, undone at the end of the context: one shadow at a time, in a process
where nothing else runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from workbench.gpus.catalogue import Gpu
from workbench.predict.shadow.attention import CudaAttention
from workbench.predict.shadow.autocast import cuda_autocast

# torch.optim hides the module of this name
FOREACH_MODULES: tuple[Any, ...] = (torch.utils._foreach_utils, import_module("torch.optim.optimizer"))
COUNTING_MODULES: tuple[Any, ...] = (import_module("torch.optim.adam"),)


@contextmanager
def traceable(padding: bool) -> Iterator[None]:
    """What fake tensors need on any device: they have no values to look at, and are not `torch.Tensor` by type."""
    from transformers import masking_utils

    from workbench.run import trainer

    known: Callable[..., bool] = masking_utils._ignore_causal_mask_sdpa
    packed: Callable[..., Any] = masking_utils.find_packed_sequence_indices

    def ignore_mask(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        """transformers reads whether a mask masks anything; here the answer is given."""
        if padding_mask is not None and padding:
            return False
        return known(None, *args, **kwargs)

    def not_packed(position_ids: torch.Tensor) -> None:
        packed(position_ids)  # makes what it makes, and finds one sequence per row

    with ExitStack() as stack:
        stack.enter_context(patch.object(masking_utils, "_ignore_causal_mask_sdpa", ignore_mask))
        stack.enter_context(patch.object(masking_utils, "find_packed_sequence_indices", not_packed))
        for module in FOREACH_MODULES:
            known_types = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", known_types))
        for module in COUNTING_MODULES:
            # the number of steps taken so far goes into the arithmetic, and into nothing that allocates
            stack.enter_context(patch.object(module, "_get_value", lambda step: 1.0))
        # how many tokens are padding is for the record; it is counted on the device, where there is nothing to count
        stack.enter_context(patch.object(trainer, "count_padding", lambda inputs: 0))
        yield


@contextmanager
def cuda_choices(gpu: Gpu) -> Iterator[CudaAttention]:
    """Kernels, precisions and optimizer implementations as on this GPU. Yields what attention was asked."""
    attention = CudaAttention(gpu)
    with ExitStack() as stack:
        stack.enter_context(cuda_autocast())
        stack.enter_context(_native_dropout())
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", attention))
        for module in FOREACH_MODULES:
            stack.enter_context(patch.object(module, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]))
        yield attention


@contextmanager
def _native_dropout() -> Iterator[None]:
    """CUDA's dropout is one kernel with a mask of one byte per element; the CPU's keeps a mask of floats."""
    library = torch.library.Library("aten", "IMPL")  # lives as long as the context

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or tensor.numel() == 0:
            return tensor
        return torch.native_dropout(tensor, p, train)[0]

    try:
        library.impl("dropout", dropout, "AutogradCPU")
        yield
    finally:
        library._destroy()


class UnreadScaler(torch.amp.GradScaler):
    """Loss scaling that does not look whether a gradient overflowed, since fake gradients cannot: it steps always."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)
