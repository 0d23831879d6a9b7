"""The tracker finds out which tensors are alive, since when, and what they are for.

`StorageTracker` is a `TorchDispatchMode`: it sees every operation's outputs, books each new storage with its size,
and learns of its end through a weak reference. What a storage was *for* is decided afterwards, when its whole life is
known: a tensor that outlives the forward pass it was born in was an activation, one that became `parameter.grad` was
a gradient from birth. Nothing is kept alive and no arithmetic changes.

A gradient is what becomes `parameter.grad`, also if the backward pass itself uses and frees it: the meter labels it
as it arrives there. The gradient of GPT-2's tied embedding arrives once, as the sum of two parts, from the logits and
from the input; the sum is a gradient, and the parts are temporaries until it is made.

Scratch memory that a kernel takes and returns inside one operation is invisible here; on a GPU the allocator's own
peak shows it, and the meter reports the difference as `unattributed`.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.base.categories import Category, Phase, format_bytes
from workbench.measure.out_of_memory import Refusal
from workbench.measure.timeline import Timeline, live_bytes, phases_of


@dataclass(slots=True)
class Storage:
    """One allocation. `born` and `died` are readings of the tracker's event clock; `died` is None while it lives."""

    nbytes: int
    born: int
    phase: Phase | None
    forward_pass: int | None  # the pass it was born in, None outside of forward passes
    label: Category | None = None
    died: int | None = None


def has_wrapper(types: Iterable[type]) -> bool:
    """Whether one of these tensor classes wraps other tensors. Its operations are dispatched again, on the inner
    ones."""
    return any(hasattr(tensor_class, "__tensor_flatten__") for tensor_class in types)


class StorageTracker(TorchDispatchMode):
    """A dispatch mode that books every tensor storage created on one device type while it is active.

    Args:
        device_type: only storages on this kind of device are booked, for example `"cpu"`.
        vocabulary_size: tensors whose last dimension is this are logits, or their loss and its gradient.
        cap_bytes: an operation inside a phase that leaves more bytes alive than this raises `torch.OutOfMemoryError`,
            after its outputs were booked. None: no limit.

    Attributes:
        failed_operation: the operation that ran out of memory, `aten.mm.default`; empty if none did.
        refusal: the bytes that this operation would have added, and those alive before it; empty without a cap.
    """

    # torch.compile, and operators that hold graphs, work under the tracker as they do without it: otherwise another
    # program would be tracked than the one that is compiled.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, device_type: str, vocabulary_size: int | None = None, *, cap_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.vocabulary_size = vocabulary_size
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.storages: list[Storage] = []
        self.failed_operation = ""
        self.refusal = Refusal()
        self._alive: dict[int, Storage] = {}
        self._clock = 0
        self._phase: Phase | None = None
        self._phase_starts: list[tuple[int, Phase | None]] = [(0, None)]
        # The clock at the end of each forward pass. How many there are is the number of the pass that is open.
        self._forward_pass_ends: list[int] = []
        self._in_forward_pass = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_wrapper(types):
            return NotImplemented
        before = self.live_bytes
        try:
            out = func(*args, **(kwargs or {}))
        except torch.OutOfMemoryError:
            self.failed_operation = str(func)
            raise
        # Under gradient checkpointing the backward phase contains forward passes of its own, the recomputations:
        # they are the operations of that phase that run with gradients enabled.
        recomputing = self._phase is Phase.BACKWARD and torch.is_grad_enabled()
        self._set_in_forward_pass(self._phase is Phase.FORWARD or recomputing)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._book(leaf)
        if self.cap_bytes is not None and self._phase is not None and self.live_bytes > self.cap_bytes:
            self.failed_operation = str(func)
            self.refusal = Refusal(requested_bytes=max(self.live_bytes - before, 0), allocated_bytes=before)
            raise torch.OutOfMemoryError(
                f"the {self._phase.replace('_', ' ')} phase would hold "
                f"{format_bytes(self.live_bytes)} of tensors; the memory cap is "
                f"{format_bytes(self.cap_bytes)}."
            )
        return out

    def enter_phase(self, phase: Phase | None) -> None:
        """Let what follows belong to a phase, or to none."""
        self._set_in_forward_pass(False)
        self._phase = phase
        self._phase_starts.append((self._clock, phase))

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        """Say what living tensors are for; a tensor not seen before is booked as alive from now on."""
        for tensor in tensors:
            storage = self._book(tensor)
            if storage is not None:
                storage.label = category

    def _set_in_forward_pass(self, inside: bool) -> None:
        if self._in_forward_pass and not inside:
            self._forward_pass_ends.append(self._clock)
        self._in_forward_pass = inside

    def _book(self, tensor: torch.Tensor) -> Storage | None:
        """Return the storage of a tensor, and book it if it is new; None if it takes no memory of this device."""
        if not self._watches(tensor):
            return None
        memory = tensor.untyped_storage()
        storage = self._alive.get(memory._cdata)
        if storage is not None:
            return storage
        if memory.nbytes() == 0:
            return None
        forward_pass = None
        if self._in_forward_pass:
            forward_pass = len(self._forward_pass_ends)
        storage = Storage(memory.nbytes(), self._tick(), self._phase, forward_pass)
        self.storages.append(storage)
        self.live_bytes += storage.nbytes
        self._alive[memory._cdata] = storage
        # The weak reference is to the storage, which outlives the tensor if a view of it does.
        weakref.finalize(memory, self._bury, memory._cdata, storage).atexit = False
        # Only the tensor that was made with the storage is asked for its shape: later views may be transposed.
        if tensor.ndim >= 2 and tensor.shape[-1] == self.vocabulary_size:
            storage.label = Category.LOGITS_AND_LOSS
        return storage

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type and tensor.layout is torch.strided

    def _bury(self, key: int, storage: Storage) -> None:
        storage.died = self._tick()
        self.live_bytes -= storage.nbytes
        if self._alive.get(key) is storage:  # a new storage may have its address already
            del self._alive[key]

    def _tick(self) -> int:
        self._clock += 1
        return self._clock - 1

    def category(self, storage: Storage) -> Category:
        """Decide what a storage was for, by its whole life, or by its life until now."""
        if storage.label is not None:
            return storage.label
        if storage.forward_pass is None or storage.forward_pass >= len(self._forward_pass_ends):
            return Category.TEMPORARIES
        if storage.died is None or storage.died >= self._forward_pass_ends[storage.forward_pass]:
            return Category.ACTIVATIONS  # it has outlived the pass that it was born in
        return Category.TEMPORARIES

    def lives(self) -> dict[str, Any]:
        """Return columns of shape (storages,): the size in bytes, the events of birth and end (-1: it lives), and the
        number of the category that the storage turned out to have."""
        numbers = {category: number for number, category in enumerate(Category)}
        rows = []
        for storage in self.storages:
            died = -1 if storage.died is None else storage.died
            rows.append((storage.nbytes, storage.born, died, numbers[self.category(storage)]))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T  # without rows, four empty columns
        return dict(zip(("nbytes", "born", "died", "category"), columns, strict=True))

    def timeline(self) -> Timeline:
        """Return the whole history so far."""
        lives = self.lives()
        events = max(self._clock, 1)  # read after the lives: storages may end meanwhile
        return Timeline(live_bytes(lives, events), phases_of(events, self._phase_starts))
