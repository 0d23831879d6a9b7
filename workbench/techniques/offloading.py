"""The base of the two kinds of offloading: the places where tensors wait, with an account of what they hold."""

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
    """Page-locked host memory. Copies run on the GPU's current stream, in order with its other work."""

    def allocate(self, like: "torch.Tensor") -> Any:
        """Return room for a tensor's elements, without writing anything."""
        return like.new_empty(like.numel(), device="cpu", pin_memory=True)

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        """Write `data`, a tensor of one dimension, from element `start` of the room on."""
        room[start : start + len(data)].copy_(data, non_blocking=True)

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        """Fill `buffer`, a tensor of one dimension, from element `start` of the room on."""
        buffer.copy_(room[start : start + len(buffer)], non_blocking=True)

    def close(self) -> None:
        """Do nothing: the memory goes with its tensors."""


class DiskFile:
    """A file without a name in TMPDIR. Its space is free again when its last user is gone, even after a kill."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by the finalizer
        self.close = weakref.finalize(self, self.file.close)
        self.nbytes = 0

    def allocate(self, like: "torch.Tensor") -> Any:
        """Return the offset of the room in the file, in bytes."""
        room = self.nbytes
        self.nbytes += like.nbytes
        return room

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        """Write the bytes of `data`. Raises OSError when the disk is full."""
        self.file.seek(room + start * data.element_size())
        self.file.write(as_bytes(data.cpu()))
        self.file.flush()

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        host = buffer.cpu()  # `cpu` returns the buffer itself if it is there already
        self.file.seek(room + start * buffer.element_size())
        data = as_bytes(host)
        if self.file.readinto(data) != len(data):
            raise OSError("a file of offloaded tensors was cut short")
        if host is not buffer:
            buffer.copy_(host)


def as_bytes(tensor: Any) -> Any:
    """Return the memory of a tensor on the CPU as bytes, because NumPy knows no bfloat16."""
    import torch

    return tensor.view(torch.uint8).numpy().data


PLACES: dict[str, tuple[type[Any], Account]] = {"cpu": (HostMemory, HOST), "disk": (DiskFile, DISK)}


class Nowhere(HostMemory):
    """A place for predictions, which keeps nothing: copies outside of the device take none of its memory.

    A copy that comes back fills a buffer that is there already.
    """

    def allocate(self, like: "torch.Tensor") -> None:
        pass

    def store(self, room: Any, start: int, data: "torch.Tensor") -> None:
        pass

    def load(self, room: Any, start: int, buffer: "torch.Tensor") -> None:
        pass


class Room:
    """Room at a place. The account counts it as long as this object lives."""

    def __init__(self, room: Any) -> None:
        self.room = room


class AccountedPlace:
    """A place with an account of the bytes that it holds and moves, and a clear message when the disk is full.

    Args:
        place: the class of the place.
        owner: the name of the technique, for the message.
        what: the tensors that it keeps there, for the message.
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
    what: ClassVar[str]  # names the tensors that wait there, for messages

    @property
    def place(self) -> type[Any]:
        """The class of the place, as a script uses it."""
        return PLACES[self.to][0]

    def with_account(self) -> dict[str, Any]:
        """Return the argument `place` as a run passes it: the place with an account."""
        _, account = PLACES[self.to]
        return {"place": partial(AccountedPlace, self.place, account, self.name, self.what)}

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
        # A CPU computes in the host's memory.
        return (cls(to="disk" if compute_capability is None else "cpu"),)

    def stand_in(self) -> Technique:
        """Return the technique with a place that keeps nothing, since copies take no memory of the device."""
        return self.replacing(place=Nowhere)
