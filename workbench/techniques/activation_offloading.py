"""Activation offloading: between forward and backward pass, activations wait in host memory or on a disk."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.base.settings import setting
from workbench.techniques.base import Call, Capability
from workbench.techniques.offloading import Offloading


class Copy:
    """A copy of one storage at a place outside of the device's memory.

    However many saved tensors look into the storage, it is written once, and read back once while one of them is in
    use.
    """

    def __init__(self, tensor: Any, place: Any) -> None:
        import torch

        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        # whatever part the tensor shows
        data = tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
        self.original = weakref.ref(storage)
        self.version = tensor._version  # which counts changes in place
        self.device = data.device
        self.nbytes = len(data)
        self.place = place
        self.room = place.allocate(data)
        place.store(self.room, 0, data)
        self.storage: weakref.ref[Any] | None = None  # on the device again

    def restored(self) -> Any:
        """All bytes of the storage, on the device."""
        import torch

        storage: Any = self.storage and self.storage()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.place.load(self.room, 0, buffer)
        # of the tensor that is made of this buffer, autograd keeps nothing but the storage
        self.storage = weakref.ref(buffer.untyped_storage())
        return buffer


class SavedTensors:
    """The hooks for one forward pass: `torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)`.

    Args:
        keep: parameters and buffers, which stay in memory anyway.
        minimum_bytes: smaller tensors stay where they are.
        place: has `allocate`, `store`, `load` and `close`.
    """

    def __init__(self, keep: list[Any], minimum_bytes: int, place: Any) -> None:
        self.keep = {tensor.untyped_storage()._cdata for tensor in keep}
        self.minimum_bytes = minimum_bytes
        self.place = place
        self.copies: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def stays(self, tensor: Any) -> bool:
        """Whether a saved tensor is left where it is."""
        import torch
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return True
        # also a parameter that FSDP has gathered
        if torch.nn.Parameter in (type(tensor), type(tensor._base)):
            return True
        storage = tensor.untyped_storage()
        # `Copy` could not show it as such elements
        in_parts = storage.nbytes() % tensor.element_size() != 0
        return storage._cdata in self.keep or storage.nbytes() < max(self.minimum_bytes, 1) or bool(in_parts)

    def pack(self, tensor: Any) -> Any:
        """What autograd keeps in place of a tensor: the tensor, or a function that brings it back."""
        if self.stays(tensor):
            # kept whole, the result of an operation would keep the operation, which keeps what is packed: for ever, if
            # no backward pass comes to free it, as with DoRA's norm
            if tensor.grad_fn is None:
                return tensor
            return tensor.detach()
        storage = tensor.untyped_storage()
        copy = self.copies.get(storage._cdata)
        # another storage may have the address by now, and the same one may have been changed in place
        if copy is None or copy.original() is not storage or copy.version != tensor._version:
            copy = Copy(tensor, self.place)
            self.copies[storage._cdata] = copy
        dtype = tensor.dtype
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())

        def restored() -> Any:
            return copy.restored().view(dtype).as_strided(*view)

        return restored

    @staticmethod
    def unpack(saved: Any) -> Any:
        if callable(saved):
            return saved()
        return saved


def offload_activations(trainer: Any, place: Callable[[], Any], minimum_bytes: int) -> None:
    """What each forward pass of the trainer saves for the backward pass waits at a place of its own."""
    from torch.autograd.graph import saved_tensors_hooks

    plain_context = trainer.compute_loss_context_manager

    def context() -> Any:
        pass_place = place()
        keep = [*trainer.model.parameters(), *trainer.model.buffers()]
        hooks = SavedTensors(keep, minimum_bytes, pass_place)

        def close_after_failure(error_type: Any, *_: Any) -> None:
            if error_type:  # no backward pass follows
                pass_place.close()

        stack = plain_context()
        stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
        stack.push(close_after_failure)
        return stack

    trainer.compute_loss_context_manager = context


@dataclass(frozen=True)
class ActivationOffloading(Offloading):
    """Every tensor that the forward pass saves for the backward pass is copied away and comes back when it is needed.

    PyTorch tutorial "Hooks for autograd saved tensors"; `torch.autograd.graph.save_on_cpu` is the simple form, which
    copies each saved view by itself, the weights too. Here a storage goes once, weights and small tensors stay. The
    copies have the layout of the originals, so the numbers are the same to the last bit.
    """

    minimum_bytes: int = setting(65536, "smaller tensors stay", minimum=0)

    retired = MappingProxyType({"overlap": False})
    brings = frozenset({Capability.OFFLOADED_ACTIVATIONS})
    what = "activations"

    def trainer(self) -> Call:
        settings = {"place": self.place, "minimum_bytes": self.minimum_bytes}
        return Call(offload_activations, settings, measured=self.counted())
