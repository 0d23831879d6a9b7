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
    """A copy of one storage, kept outside of the device's memory.

    Several saved tensors may be views of one storage. It is written once for all of them, and read back once as long
    as one of them is in use.
    """

    def __init__(self, tensor: Any, place: Any) -> None:
        import torch

        storage = tensor.untyped_storage()
        elements = storage.nbytes() // tensor.element_size()
        # Copy the whole storage, whichever part of it the tensor shows.
        data = tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
        self.original = weakref.ref(storage)
        self.version = tensor._version  # PyTorch counts changes in place
        self.device = data.device
        self.nbytes = len(data)
        self.place = place
        self.room = place.allocate(data)
        place.store(self.room, 0, data)
        self.storage: weakref.ref[Any] | None = None  # the storage that was read back, while it is in use

    def restore(self) -> Any:
        """Return all bytes of the storage, on the device: a tensor of uint8."""
        import torch

        storage: Any = self.storage and self.storage()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.place.load(self.room, 0, buffer)
        # Autograd keeps the storage of the view that is made of this buffer, and not the buffer itself.
        self.storage = weakref.ref(buffer.untyped_storage())
        return buffer


class SavedTensors:
    """Hooks for one forward pass: `torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)`.

    Args:
        keep: parameters and buffers, which stay in memory anyway.
        minimum_bytes: smaller storages stay where they are.
        place: an object that keeps copies, with `allocate`, `store`, `load` and `close`.
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
        # Parameters stay, and views of them, as of one that FSDP has gathered.
        if torch.nn.Parameter in (type(tensor), type(tensor._base)):
            return True
        storage = tensor.untyped_storage()
        # `Copy` views the whole storage as elements of the tensor's type, which may not divide it.
        in_parts = storage.nbytes() % tensor.element_size() != 0
        return storage._cdata in self.keep or storage.nbytes() < max(self.minimum_bytes, 1) or bool(in_parts)

    def pack(self, tensor: Any) -> Any:
        """Return what autograd keeps in place of a tensor: the tensor, or a function that brings it back."""
        if self.stays(tensor):
            # Detach it: tensor -> grad_fn -> packed tensor is a cycle. A backward pass would free it, but there may be
            # none, as for DoRA's norm.
            return tensor if tensor.grad_fn is None else tensor.detach()
        storage = tensor.untyped_storage()
        copy = self.copies.get(storage._cdata)
        # The address may belong to another storage by now, or the storage may have been changed in place.
        if copy is None or copy.original() is not storage or copy.version != tensor._version:
            copy = Copy(tensor, self.place)
            self.copies[storage._cdata] = copy
        dtype = tensor.dtype
        view = (tensor.size(), tensor.stride(), tensor.storage_offset())

        def restore() -> Any:
            return copy.restore().view(dtype).as_strided(*view)

        return restore

    @staticmethod
    def unpack(saved: Any) -> Any:
        return saved() if callable(saved) else saved


def offload_activations(trainer: Any, place: Callable[[], Any], minimum_bytes: int) -> None:
    """Let the tensors that the trainer's forward passes save wait at a place outside of the device's memory.

    Args:
        place: makes such a place. Each forward pass has one of its own, which goes with its last tensor.
        minimum_bytes: smaller tensors stay on the device.
    """
    from torch.autograd.graph import saved_tensors_hooks

    plain_context = trainer.compute_loss_context_manager

    def context() -> Any:
        pass_place = place()
        keep = [*trainer.model.parameters(), *trainer.model.buffers()]
        hooks = SavedTensors(keep, minimum_bytes, pass_place)

        def close_after_failure(error_type: Any, *_: Any) -> None:
            if error_type:  # then no backward pass follows, which would empty the place
                pass_place.close()

        stack = plain_context()
        stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
        stack.push(close_after_failure)
        return stack

    trainer.compute_loss_context_manager = context


@dataclass(frozen=True)
class ActivationOffloading(Offloading):
    """Every tensor that the forward pass saves for the backward pass is copied away and comes back when it is needed.

    PyTorch tutorial "Hooks for autograd saved tensors". Its simple form is `torch.autograd.graph.save_on_cpu`, which
    copies each saved view by itself, the weights too. Here a storage is copied once, and weights and small tensors
    stay. The copies have the layout of the originals, so the numbers are the same to the last bit.
    """

    minimum_bytes: int = setting(65536, "smaller tensors stay", minimum=0)

    retired = MappingProxyType({"overlap": False})
    brings = frozenset({Capability.OFFLOADED_ACTIVATIONS})
    what = "activations"

    def trainer(self) -> Call:
        settings = {"place": self.place, "minimum_bytes": self.minimum_bytes}
        return Call(offload_activations, settings, measured=self.with_account())
