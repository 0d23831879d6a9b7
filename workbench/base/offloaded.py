"""The account of bytes moved out of device memory. Code that moves bytes enters them; a record reports their peak.

    HOST.take(nbytes)     # room in host memory, held from now on
    HOST.move(nbytes)     # written there, or read back
    HOST.release(nbytes)  # no longer held

A process has one account for the host's memory and one for the disk, as it has one allocator. Only bytes that are held
on purpose are counted; the process's resident memory also holds libraries and caches, and never says what grew.
"""

from dataclasses import dataclass


@dataclass
class Account:
    """The bytes held now, their peak, and all bytes moved there or back since the last reset."""

    held_bytes: int = 0
    peak_bytes: int = 0
    moved_bytes: int = 0

    def take(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def move(self, nbytes: int) -> None:
        self.moved_bytes += nbytes

    def release(self, nbytes: int) -> None:
        self.held_bytes -= nbytes

    def reset(self) -> None:
        """Begin a new run. What is still held stays held."""
        self.peak_bytes = self.held_bytes
        self.moved_bytes = 0


HOST = Account()
DISK = Account()
