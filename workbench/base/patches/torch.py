"""Patches of PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, cast

from workbench.base.patches import replace_attribute


@contextmanager
def resize_storages_by(resize: Callable[[Any, int], Any]) -> Iterator[None]:
    """Let `UntypedStorage.resize_` be a function of (storage, size).

    FSDP2 empties storages and fills them again in place. While PyTorch 2.x has no operation for that, no dispatch mode
    sees it.
    """
    import torch

    # `resize` may be a bound method, which would not receive the storage; a lambda does.
    with replace_attribute(torch.UntypedStorage, "resize_", lambda storage, size: resize(storage, size)):
        yield


@contextmanager
def hide_tried_operations() -> Iterator[None]:
    """Hide from dispatch modes the whole fake tensors on which DTensor tries an operation, to learn what it returns.

    PyTorch 2.10 to 2.13, in which this was read, keeps the modes on meanwhile.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    try_operation = getattr(ShardingPropagator, name)

    def try_hidden(*args: Any) -> Any:
        with _disable_current_modes():
            return try_operation(*args)

    with replace_attribute(ShardingPropagator, name, try_hidden):
        yield


# ---- tensors without values. Names were read in PyTorch 2.10 to 2.13 ----


@contextmanager
def update_lists_at_once(tensor_class: type | None = None, *device_kinds: str) -> Iterator[None]:
    """Let optimizers update a list of tensors at once also where they are of this class, or on these kinds of devices.

    PyTorch looks the class and the device up in lists of its own.
    """
    devices = [*device_kinds]
    with ExitStack() as stack:
        # `import_module` finds torch.optim.optimizer; as an attribute, torch.optim hides it.
        for module in (import_module("torch.utils._foreach_utils"), import_module("torch.optim.optimizer")):
            if tensor_class:
                classes = [*module._foreach_supported_types, tensor_class]
                stack.enter_context(replace_attribute(module, "_foreach_supported_types", classes))
            if devices:
                stack.enter_context(
                    replace_attribute(module, "_get_foreach_kernels_supported_devices", lambda: devices)
                )
        yield


@contextmanager
def read_no_values_in_optimizers_and_ddp() -> Iterator[None]:
    """Keep Adam from reading how many steps were taken, and DistributedDataParallel from reading the shapes of the
    other ranks and the order in which gradients came."""
    import torch
    from torch.nn.parallel import distributed

    reducer = cast("Any", torch.distributed).Reducer
    with (
        replace_attribute(import_module("torch.optim.adam"), "_get_value", lambda step: 1.0),
        replace_attribute(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        replace_attribute(reducer, "_rebuild_buckets", lambda _: False),
    ):
        yield


@contextmanager
def allow_grouped_products_in_any_type() -> Iterator[None]:
    """Let fake tensors multiply by groups, as a mixture of experts does, in fp32 too: PyTorch refuses that for fake
    tensors, and its kernels take it. The product has the same size whichever expert a token goes to."""
    from torch import _meta_registrations as meta

    def product(a: Any, b: Any, *_: Any, offs: Any = None, **options: Any) -> Any:
        return meta._create_grouped_mm_output_tensor(a, b, offs, options.get("out_dtype"))

    with replace_attribute(meta, "_meta_grouped_mm_common", product):
        yield


@contextmanager
def let_storages_go() -> Iterator[None]:
    """Let `set_` on a fake tensor return a new fake tensor on the whole storage: the old one would keep the storage
    alive for ever."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    set_plain = torch._C.TensorBase.set_

    def on_storage(tensor: Any, storage: Any, *place: Any) -> Any:
        if not isinstance(tensor, FakeTensor):
            return set_plain(tensor, storage, *place)
        with _disable_current_modes():
            plain = set_plain(torch.empty(0, dtype=tensor.dtype, device=storage.device), storage)
        mode = tensor.fake_mode
        return mode.fake_tensor_converter.from_meta_and_device(mode, plain, tensor.fake_device)

    with replace_attribute(torch.Tensor, "set_", on_storage):
        yield


@contextmanager
def attend_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Let a function be `torch.nn.functional.scaled_dot_product_attention`: a CPU takes other kernels than a GPU, which
    keep other tensors for the backward pass."""
    import torch

    with replace_attribute(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield


@contextmanager
def drop_out_in_one_kernel() -> Iterator[None]:
    """Give a CPU the dropout of CUDA: one kernel, with a mask of one byte per element, where its own keeps floats."""
    import torch

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or tensor.numel() == 0:
            return tensor
        return torch.native_dropout(tensor, p, train)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", dropout, "AutogradCPU")
        yield
