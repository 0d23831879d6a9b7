"""What the two kinds of offloading share: where tensors wait, what that takes there, and when it is refused."""

import tempfile
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.base.categories import format_bytes
from workbench.base.device import Device
from workbench.base.errors import UnavailableError
from workbench.base.offloaded import DISK, HOST, Account
from workbench.base.paths import no_disk
from workbench.base.settings import setting
from workbench.techniques.base import Stage, Technique

if TYPE_CHECKING:
    import torch


class HostMemory:
    """Page-locked host memory. The copies run on the GPU's current stream, in order with what computes there."""

    def allocate(self, like: "torch.Tensor") -> Any:
        """Room for a tensor's elements; nothing is written there yet."""
        return like.new_empty(like.numel(), device="cpu", pin_memory=True)

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        """Write a tensor of one dimension, from element `start` of the room on."""
        room[start : start + len(data)].copy_(data, non_blocking=True)

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        """Fill a tensor of one dimension, from element `start` of the room on."""
        buffer.copy_(room[start : start + len(buffer)], non_blocking=True)

    def close(self) -> None:
        """Nothing that waits here is needed any more."""


class DiskFile:
    """A file without a name in TMPDIR: its space is free again when the last user is gone, even after a kill."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the finalizer
        self.close = weakref.finalize(self, self.file.close)
        self.nbytes = 0

    def allocate(self, like: "torch.Tensor") -> Any:
        """The offset of the room in the file, in bytes."""
        room = self.nbytes
        self.nbytes += like.nbytes
        return room

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        """Raises OSError when the disk is full."""
        self.file.seek(room + start * data.element_size())
        self.file.write(as_bytes(data.cpu()))
        self.file.flush()

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        host = buffer.cpu()  # the buffer itself, if that is where it is
        self.file.seek(room + start * buffer.element_size())
        data = as_bytes(host)
        if self.file.readinto(data) != len(data):
            raise OSError("a file of offloaded tensors was cut short")
        if host is not buffer:
            buffer.copy_(host)


def as_bytes(tensor: Any) -> Any:
    """The memory of a tensor of the CPU, for files; NumPy knows no bfloat16."""
    import torch

    return tensor.view(torch.uint8).numpy().data


PLACES: dict[str, tuple[type[Any], Account]] = {"cpu": (HostMemory, HOST), "disk": (DiskFile, DISK)}


class Nowhere(HostMemory):
    """For predictions: what waits outside of the device takes nothing of it, and what comes back fills a buffer that is
    there already."""

    def allocate(self, like: "torch.Tensor") -> None:
        pass

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        pass

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        pass


class Room:
    """Room at a place, which is in the account as long as this object lives."""

    def __init__(self, room: Any) -> None:
        self.room = room


class Counted:
    """A place with an account of what it holds and moves, and a clear message when the disk is full.

    Args:
        owner: the technique, and `what` it keeps there, for the message.
    """

    def __init__(self, place: type[Any], account: Account, owner: str, what: str) -> None:
        self.place = place()
        self.account = account
        self.owner = owner
        self.what = what

    def allocate(self, like: "torch.Tensor") -> Room:
        room = Room(self.place.allocate(like))
        self.account.take(like.nbytes)
        weakref.finalize(room, self.account.release, like.nbytes).atexit = False
        return room

    def store(self, room: Room, start: int, data: "torch.Tensor") -> None:
        self.account.move(data.nbytes)
        try:
            self.place.store(room.room, start, data)
        except OSError as error:
            raise UnavailableError(
                f"{self.owner}: {tempfile.gettempdir()} holds "
                f"{format_bytes(self.account.held_bytes)} of {self.what} and cannot take "
                f"{format_bytes(data.nbytes)} more ({error.strerror}). Free space there, or let "
                "the environment variable TMPDIR name a folder on a larger disk."
            ) from error

    def load(self, room: Room, start: int, buffer: "torch.Tensor") -> None:
        self.account.move(buffer.nbytes)
        self.place.load(room.room, start, buffer)

    def close(self) -> None:
        self.place.close()


@dataclass(frozen=True)
class Offloading(Technique):
    """Base of the techniques that let tensors of the training wait outside of the device's memory."""

    to: str = setting("cpu", "where they wait: host memory, or a file in TMPDIR", choices=("cpu", "disk"))

    stage = Stage.WRAP
    what: ClassVar[str]  # the tensors that wait there, in words

    @property
    def place(self) -> type[Any]:
        return PLACES[self.to][0]

    def counted(self) -> dict[str, Any]:
        """The same place with an account, as a run needs it."""
        _, account = PLACES[self.to]
        return {"place": partial(Counted, self.place, account, self.name, self.what)}

    def missing(self, device: Device) -> str | None:
        if self.to == "cpu" and device.kind != "cuda":
            return (
                f"{self.name}=to:cpu needs a CUDA device, and this run is on the {device.kind}: "
                "its memory is the host's own, so nothing would move. Use to:disk."
            )
        if self.to == "disk" and no_disk():
            return f"{self.name}=to:disk: {no_disk()}"
        return None

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        if compute_capability is None:  # a CPU's memory is the host's already
            return (cls(to="disk"),)
        return (cls(),)

    def stand_in(self) -> Technique:
        """The same tensors go and come back at the same moments; their copies take no memory of the device."""
        return self.replacing(place=Nowhere)
