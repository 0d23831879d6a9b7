"""Activation offloading: between forward and backward pass, activations wait in host memory or on a disk."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.settings import setting
from workbench.techniques.base import Call, Capability
from workbench.techniques.offloading import Offloading, SideStream


class Copy:
    """A storage, written once however many saved tensors look into it, read back once while one of them is in use."""

    def __init__(self, tensor: Any, place: Any, before: "Callable[[], Copy | None]") -> None:
        import torch

        storage = tensor.untyped_storage()
        data = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0).view(torch.uint8)
        self.of, self.version, self.device, self.nbytes = weakref.ref(storage), tensor._version, data.device, len(data)
        self.place, self.room = place, place.allocate(data)
        self.sent: Any = place.store(self.room, 0, data)  # the event, of a copy on a stream of its own
        self.arrived: Any = False  # not even asked for
        self.before = before
        self.last: Callable[[], Any] = lambda: None

    def restored(self) -> Any:
        """All bytes of the storage, on the device."""
        import torch

        if (alive := self.last()) is not None:
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(alive)
        buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.arrived = self.place.load(self.room, 0, buffer)
        self.last = weakref.ref(buffer.untyped_storage())  # which is all of the tensor that autograd keeps
        return buffer


class SavedTensors:
    """The hooks for one forward pass: `torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)`.

    Args:
        keep: parameters and buffers, which stay in memory anyway.
        minimum_bytes: smaller tensors stay where they are.
        place: has `allocate`, `store`, `load` and `close`.
        overlap: what leaves is held until the next one leaves, and one comes back before it is asked for.
    """

    def __init__(self, keep: list[Any], minimum_bytes: int, place: Any, overlap: bool = False) -> None:
        self.keep = {tensor.untyped_storage()._cdata for tensor in keep}
        self.minimum_bytes, self.place, self.overlap = minimum_bytes, place, overlap
        self.newest: Callable[[], Copy | None] = lambda: None
        self.held: dict[int, tuple[Any, Any]] = {}  # by the copy that comes, and 0, what leaves
        self.copies: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def stays(self, tensor: Any) -> bool:
        import torch
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        special = is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided
        if special or torch.nn.Parameter in (type(tensor), type(tensor._base)):  # one that FSDP has gathered, too
            return True
        storage = tensor.untyped_storage()
        whole = storage.nbytes() % tensor.element_size() == 0
        return storage._cdata in self.keep or storage.nbytes() < max(self.minimum_bytes, 1) or not whole

    def pack(self, tensor: Any) -> Any:
        if self.stays(tensor):
            # kept whole, the result of an operation would keep the operation, which keeps what is packed: for ever, if
            # no backward pass comes to free it, as with DoRA's norm
            return tensor if tensor.grad_fn is None else tensor.detach()
        storage = tensor.untyped_storage()
        copy = self.copies.get(storage._cdata)
        if copy is None or copy.of() is not storage or copy.version != tensor._version:
            copy = self.copies[storage._cdata] = Copy(tensor, self.place, self.newest)
            if self.overlap:
                self.newest = weakref.ref(copy)
                self.settle(0)
                self.held[0] = storage, copy.sent
        dtype, (size, stride, offset) = tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset())
        return lambda: self.back(copy).view(dtype).as_strided(size, stride, offset)

    def back(self, copy: Copy) -> Any:
        """All bytes of its storage; and the one that was packed before it, which is needed after it, sets out."""
        self.settle(0)
        buffer, before = copy.restored(), copy.before()
        self.settle(id(copy), copy.arrived)
        if before and before.arrived is False:
            self.held[id(before)] = before.restored(), before.arrived
        return buffer

    def settle(self, key: int, event: Any = None) -> None:
        """Let go of what is held: all that is computed from now on comes after its copy, or after the event."""
        if event := self.held.pop(key, (None, event))[1]:
            event.wait()

    def __del__(self) -> None:
        for key in [*self.held]:  # what came and nobody asked for
            self.settle(key)

    @staticmethod
    def unpack(saved: Any) -> Any:
        return saved() if callable(saved) else saved


def offload_activations(trainer: Any, place: Callable[[], Any], minimum_bytes: int, overlap: bool) -> None:
    """What each forward pass of the trainer saves for the backward pass waits at a place of its own."""
    from torch.autograd.graph import saved_tensors_hooks

    plain = trainer.compute_loss_context_manager

    def context() -> Any:
        there = place()
        hooks = SavedTensors([*trainer.model.parameters(), *trainer.model.buffers()], minimum_bytes, there, overlap)
        stack = plain()
        stack.enter_context(saved_tensors_hooks(hooks.pack, hooks.unpack))
        stack.push(lambda kind, *_: there.close() if kind else None)  # after a failure no backward pass follows
        return stack

    trainer.compute_loss_context_manager = context


@dataclass(frozen=True)
class ActivationOffloading(Offloading):
    """Every tensor that the forward pass saves for the backward pass is copied away and comes back when it is needed.

    PyTorch tutorial "Hooks for autograd saved tensors"; `torch.autograd.graph.save_on_cpu` is the simple form, which
    copies each saved view by itself, the weights too. Here a storage goes once, weights and small tensors stay. The
    copies have the layout of the originals, so the numbers are the same to the last bit.

    With `overlap` the copies to host memory run on a stream of their own: out while the next operations compute, and
    back one ahead, in the reverse order. For that, two storages more are on the device at a time: one that leaves and
    one that comes. How much time that saves has not been measured on a GPU. A disk is waited for as before.
    """

    minimum_bytes: int = setting(65536, "smaller tensors stay", unit="bytes", minimum=0)
    overlap: bool = setting(False, "to:cpu only: copies run beside the computation, and one ahead on the way back")

    brings = frozenset({Capability.OFFLOADED_ACTIVATIONS})
    what = "activations"

    @property
    def place(self) -> type[Any]:
        return SideStream if self.overlap and self.to == "cpu" else super().place

    def trainer(self) -> Call:
        settings = {"place": self.place, "minimum_bytes": self.minimum_bytes, "overlap": self.overlap}
        return Call(offload_activations, settings, measured=self.counted())
