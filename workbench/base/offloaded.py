"""Bytes that were moved out of device memory. Who moves them keeps the account, and a record reports its peak.

    HOST.take(nbytes)     # room in host memory, held from now on
    HOST.move(nbytes)     # written there, or read back
    HOST.release(nbytes)  # no longer held

There is one account for each place in a process, as there is one allocator. What is counted are the bytes held on
purpose, not the process's resident memory, which also holds libraries and caches and never says what grew.
"""

from dataclasses import dataclass


@dataclass
class Account:
    """Bytes held now, their peak, and all bytes moved there or back since the last reset."""

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
        """A new run begins. What is still held stays held."""
        self.peak_bytes = self.held_bytes
        self.moved_bytes = 0


HOST = Account()
DISK = Account()
