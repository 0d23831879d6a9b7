"""What is replaced in PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, cast

from workbench.base.patches import replaced


@contextmanager
def storages_resized_by(resize: Callable[[Any, int], Any]) -> Iterator[None]:
    """`UntypedStorage.resize_` is this function of (storage, size).

    FSDP2 empties storages and fills them again in place. While PyTorch 2.x has no operation for that, no dispatch mode
    sees it.
    """
    import torch

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        return resize(storage, size)

    with replaced(torch.UntypedStorage, "resize_", resized):
        yield


@contextmanager
def operations_tried_unseen() -> Iterator[None]:
    """DTensor tries an operation on whole fake tensors, to learn what it returns: no dispatch mode sees these.

    Read in PyTorch 2.10 to 2.13, which keeps the modes on.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    name = "_propagate_tensor_meta_non_cached"
    try_operation = getattr(ShardingPropagator, name)

    def tried_unseen(*args: Any) -> Any:
        with _disable_current_modes():
            return try_operation(*args)

    with replaced(ShardingPropagator, name, tried_unseen):
        yield


# ---- for tensors without values. Names as in PyTorch 2.10 to 2.13 ----


@contextmanager
def lists_updated_at_once(tensor_class: type | None = None, *device_kinds: str) -> Iterator[None]:
    """Optimizers update lists of tensors at once of this class too, and, if some are named, on these kinds of devices.

    PyTorch looks a class up in a list of its own, and lets few devices do it.
    """
    devices = [*device_kinds]
    with ExitStack() as stack:
        # torch.optim hides the module of the second name
        for module in (import_module("torch.utils._foreach_utils"), import_module("torch.optim.optimizer")):
            if tensor_class:
                classes = [*module._foreach_supported_types, tensor_class]
                stack.enter_context(replaced(module, "_foreach_supported_types", classes))
            if devices:
                stack.enter_context(replaced(module, "_get_foreach_kernels_supported_devices", lambda: devices))
        yield


@contextmanager
def optimizers_and_ddp_read_no_values() -> Iterator[None]:
    """Adam does not read how many steps were taken; DistributedDataParallel reads neither the shapes of the other ranks
    nor whose gradient came first."""
    import torch
    from torch.nn.parallel import distributed

    reducer = cast("Any", torch.distributed).Reducer
    with (
        replaced(import_module("torch.optim.adam"), "_get_value", lambda step: 1.0),
        replaced(distributed, "_verify_param_shape_across_processes", lambda *_: None),
        replaced(reducer, "_rebuild_buckets", lambda _: False),
    ):
        yield


@contextmanager
def grouped_products_in_any_type() -> Iterator[None]:
    """Of fake tensors, the product of a mixture of experts is refused in fp32, which kernels take. It is as large for
    any routing."""
    from torch import _meta_registrations as meta

    def product(a: Any, b: Any, *_: Any, offs: Any = None, **options: Any) -> Any:
        return meta._create_grouped_mm_output_tensor(a, b, offs, options.get("out_dtype"))

    with replaced(meta, "_meta_grouped_mm_common", product):
        yield


@contextmanager
def storages_let_go() -> Iterator[None]:
    """A fake tensor that is set to a storage never lets it go: in its place comes another one on all of it."""
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

    with replaced(torch.Tensor, "set_", on_storage):
        yield


@contextmanager
def attention_by(attend: Callable[..., Any]) -> Iterator[None]:
    """`torch.nn.functional.scaled_dot_product_attention` is this function: a CPU takes other kernels than a GPU, which
    keep other tensors."""
    import torch

    with replaced(torch.nn.functional, "scaled_dot_product_attention", attend):
        yield


@contextmanager
def dropout_in_one_kernel() -> Iterator[None]:
    """A CPU's dropout is CUDA's: one kernel, with a mask of one byte per element, where its own keeps floats."""
    import torch

    def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or tensor.numel() == 0:
            return tensor
        return torch.native_dropout(tensor, p, train)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", dropout, "AutogradCPU")
        yield
