"""Activation offloading: between forward and backward pass, activations wait in host memory or on a disk."""

import inspect
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from workbench.errors import UnavailableError
from workbench.measure.categories import Category, format_bytes
from workbench.measure.offloaded import DISK, HOST, Account, in_memory
from workbench.settings import setting
from workbench.techniques.base import Fragment, Numerics, Technique

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class PinnedMemory:
    """Page-locked host memory. The copies run on the GPU's current stream, in order with what computes there."""

    def write(self, data: "torch.Tensor") -> "Callable[[torch.Tensor], Any]":
        """Bytes on the GPU in; out comes what fills a buffer on the GPU with them again."""
        host = data.new_empty(len(data), device="cpu", pin_memory=True).copy_(data, non_blocking=True)
        return lambda buffer: buffer.copy_(host, non_blocking=True)


class DiskFile:
    """One file without a name: its space is free again when the last reader is gone, even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the finalizer
        self.close = weakref.finalize(self, self.file.close)
        self.nbytes = 0

    def write(self, data: "torch.Tensor") -> "Callable[[torch.Tensor], Any]":
        """Bytes in; out comes what fills a buffer with them again. Raises OSError when the disk is full."""
        start = self.nbytes
        self.file.seek(start)
        self.file.write(data.cpu().numpy().data)
        self.file.flush()
        self.nbytes += len(data)
        return lambda buffer: self.read(start, buffer)

    def read(self, start: int, buffer: "torch.Tensor") -> None:
        host = buffer.cpu()  # the buffer itself, if that is where it is
        self.file.seek(start)
        if self.file.readinto(host.numpy().data) != len(host):
            raise OSError("a file of saved activations was cut short")
        if host is not buffer:
            buffer.copy_(host)


class Copy:
    """A storage, written once however many saved tensors look into it, read back once while one of them is in use."""

    def __init__(self, storage: Any, version: int, write: Callable[..., Any]) -> None:
        import torch

        data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.of, self.version, self.device, self.nbytes = weakref.ref(storage), version, data.device, len(data)
        self.read = write(data)
        self.last: Callable[[], Any] = lambda: None

    def restored(self) -> Any:
        import torch

        storage = self.last()
        if storage is None:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self.read(buffer)
            storage = buffer.untyped_storage()
            self.last = weakref.ref(storage)
        return storage


class Saved(NamedTuple):
    """A saved tensor: a view of a copied storage."""

    copy: Copy
    dtype: Any
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class SavedTensors:
    """The hooks for one forward pass: `torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)`.

    Args:
        keep: parameters and buffers, which stay in memory anyway.
        minimum_bytes: smaller tensors stay where they are.
        write: takes bytes, a tensor of uint8, and returns what fills such a tensor with them again.
    """

    def __init__(self, keep: list[Any], minimum_bytes: int, write: Callable[..., Any]) -> None:
        self.keep = {tensor.untyped_storage()._cdata for tensor in keep}
        self.minimum_bytes, self.write = minimum_bytes, write
        self.copies: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()

    def pack(self, tensor: Any) -> Any:
        import torch

        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.keep or storage.nbytes() < max(self.minimum_bytes, 1):
            return tensor
        copy = self.copies.get(storage._cdata)
        if copy is None or copy.of() is not storage or copy.version != tensor._version:
            copy = self.copies[storage._cdata] = Copy(storage, tensor._version, self.write)
        return Saved(copy, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride())

    @staticmethod
    def unpack(saved: Any) -> Any:
        import torch

        if not isinstance(saved, Saved):
            return saved
        tensor = torch.empty(0, dtype=saved.dtype, device=saved.copy.device)
        return tensor.set_(saved.copy.restored(), saved.offset, saved.size, saved.stride)


@dataclass(frozen=True)
class ActivationOffloading(Technique):
    """Every tensor that the forward pass saves for the backward pass is copied away and comes back when it is needed.

    PyTorch tutorial "Hooks for autograd saved tensors"; `torch.autograd.graph.save_on_cpu` is the simple form, which
    copies each saved view by itself, the weights too. Here a storage goes once, weights and small tensors stay. The
    copies have the layout of the originals, so the numbers are the same to the last bit.
    """

    to: str = setting("cpu", "where the activations wait: host memory, or a file in TMPDIR", choices=("cpu", "disk"))
    minimum_bytes: int = setting(65536, "smaller tensors stay", unit="bytes", minimum=0)

    name: ClassVar[str] = "activation_offloading"
    title: ClassVar[str] = "Activation offloading"
    attacks: ClassVar[tuple[Category, ...]] = (Category.ACTIVATIONS,)
    costs: ClassVar[str] = "two transfers of every activation per step, over PCIe or to a disk"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    family: ClassVar[str] = "offloading"

    def missing(self, device_type: str) -> str | None:
        if self.to == "cpu" and device_type != "cuda":
            return (
                f"activation_offloading=to:cpu needs a CUDA device, and this run is on the {device_type}: its memory "
                "is the host's own, so nothing would move. Use to:disk."
            )
        if self.to == "disk" and in_memory(Path(tempfile.gettempdir())):
            return (
                f"activation_offloading=to:disk: {tempfile.gettempdir()} is itself held in memory (tmpfs), so nothing "
                "would be saved. Let the environment variable TMPDIR name a folder on a disk."
            )
        return None

    @contextmanager
    def forward_context(self, model: "PreTrainedModel") -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        file = DiskFile() if self.to == "disk" else None
        write = file.write if file else PinnedMemory().write
        hooks = SavedTensors(
            [*model.parameters(), *model.buffers()], self.minimum_bytes, counted(write, DISK if file else HOST)
        )
        try:
            with saved_tensors_hooks(hooks.pack, hooks.unpack):
                yield
        except BaseException:
            if file:
                file.close()  # there will be no backward pass
            raise

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        return (cls(to="disk" if compute_capability is None else "cpu"),)  # a CPU's memory is the host's already

    def stand_in(self) -> "Technique":
        return Traced(**self.settings())

    def script(self) -> Fragment:
        place = DiskFile if self.to == "disk" else PinnedMemory
        return Fragment(
            imports=(
                "import tempfile",
                "import weakref",
                "from collections.abc import Callable",
                "from typing import Any, NamedTuple",
            ),
            definitions=tuple(inspect.getsource(part) + "\n" for part in (place, Copy, Saved, SavedTensors)),
            trainer=(
                "plain_context = trainer.compute_loss_context_manager",
                "",
                "",
                "def offloading_context():",
                "    keep = [*model.parameters(), *model.buffers()]",
                f"    hooks = SavedTensors(keep, {self.minimum_bytes}, {place.__name__}().write)",
                "    stack = plain_context()",
                "    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack))",
                "    return stack",
                "",
                "",
                "trainer.compute_loss_context_manager = offloading_context",
            ),
        )


class Away:
    """For predictions: the copy of a fake storage is nowhere. What fills it again is a new buffer of its bytes."""

    def __init__(self, tensor: "torch.Tensor") -> None:
        storage = tensor.untyped_storage()
        self.of, self.version, self.nbytes = weakref.ref(storage), tensor._version, storage.nbytes()
        self.last: Callable[[], Any] = lambda: None

    def restored(self) -> Any:
        import torch

        buffer = self.last()
        if buffer is None:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8)
            self.last = weakref.ref(buffer)
        return buffer


class TracedTensors(SavedTensors):
    """The same tensors go and come back at the same moments. A fake tensor cannot be set to a storage: it is a view."""

    def pack(self, tensor: Any) -> Any:
        import torch

        if isinstance(tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self.keep or storage.nbytes() < max(self.minimum_bytes, 1):
            return tensor
        copy: Any = self.copies.get(storage._cdata)
        if copy is None or copy.of() is not storage or copy.version != tensor._version:
            copy = self.copies[storage._cdata] = Away(tensor)  # type: ignore[assignment]  # in a Copy's place
        return Saved(copy, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride())

    @staticmethod
    def unpack(saved: Any) -> Any:
        if not isinstance(saved, Saved):
            return saved
        return saved.copy.restored().view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)


class Traced(ActivationOffloading):
    """The same hooks for fake tensors, whose copies take no memory of the device."""

    @contextmanager
    def forward_context(self, model: "PreTrainedModel") -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        hooks = TracedTensors([*model.parameters(), *model.buffers()], self.minimum_bytes, lambda data: None)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            yield


def counted(write: Callable[..., Any], account: Account) -> Callable[..., Any]:
    """The same writer, with an account of what it holds and moves, and a clear word when the disk is full."""

    def counting(data: "torch.Tensor") -> Callable[["torch.Tensor"], Any]:
        try:
            read = write(data)
        except OSError as error:
            raise UnavailableError(
                f"activation_offloading: {tempfile.gettempdir()} holds {format_bytes(account.held_bytes)} of "
                f"activations and cannot take {format_bytes(len(data))} more ({error.strerror}). Free space there, or "
                "let the environment variable TMPDIR name a folder on a larger disk."
            ) from error
        account.take(len(data))

        def reading(buffer: "torch.Tensor") -> None:
            account.fetch(len(buffer))
            read(buffer)

        weakref.finalize(reading, account.release, len(data)).atexit = False
        return reading

    return counting
