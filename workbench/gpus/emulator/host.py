"""The guard of this machine's own memory: a model that an emulated program builds on the host takes real bytes.

Four ranks that each build a large model on the host take four times its size. Linux would end some process, or the
machine would stand still; the guard ends the program before, with the reason.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from workbench.base.categories import format_bytes

LEAST_FREE = 0.06  # a smaller share of the machine's memory that is free is too little
LEAST_HELD = 0.25  # a program that holds a smaller share is not at fault: others fill the memory
SECONDS_TO_REPORT = 3.0  # time for the program's processes to report after an interrupt
CGROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Return the bytes of memory of this machine, or of its container if that has less, and those that are free."""
    machine = psutil.virtual_memory()
    total = machine.total
    available = machine.available
    with suppress(OSError, ValueError):  # outside of a container there are no such files, or the limit is "max"
        limit = int((CGROUP / "memory.max").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        if limit < total:
            total = limit
            available = min(available, limit - used)
    return total, available


def bytes_held_by(process: int) -> int:
    """Return the bytes of the host's memory that a process has to itself; 0 if there is no such process."""
    with suppress(psutil.Error):
        held = psutil.Process(process).memory_info()
        return int(held.rss - held.shared)
    return 0


def why_too_full(processes: Sequence[int]) -> str:
    """Say why these processes have to end now; empty if they need not."""
    total, available = memory()
    if available >= LEAST_FREE * total:
        return ""
    sizes = [bytes_held_by(process) for process in processes]
    if sum(sizes) < LEAST_HELD * total:
        return ""
    largest = " + ".join(format_bytes(size) for size in sorted(sizes, reverse=True)[:8])
    return (
        f"ended, since this machine's own memory was nearly full ({format_bytes(available)} of "
        f"{format_bytes(total)} left): the program's processes held {largest} on the host, "
        "which is real. Build the model on the card (`with torch.device('cuda'):`, "
        "or from_pretrained(..., device_map='cuda')), or emulate fewer --ranks"
    )


def end_processes(processes: Sequence[int]) -> None:
    """Interrupt the processes, so that they report, and then end them by force."""
    send(signal.SIGINT, processes)
    ends_at = time.monotonic() + SECONDS_TO_REPORT
    while any(map(bytes_held_by, processes)) and time.monotonic() < ends_at:
        time.sleep(0.1)
    send(signal.SIGKILL, processes)


def send(number: int, processes: Sequence[int]) -> None:
    """Send a signal to the processes that still run."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
