"""This machine's own memory, which a program under the emulator may fill: a model that is built on the host is real.

Four ranks that each build a large model on the host take four times its size. Linux would end some process, or the
machine would stand still; the program is ended before, with the reason.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from workbench.base.categories import format_bytes

LEAST_FREE = 0.06  # of the machine's memory
LEAST_HELD = 0.25  # of it, by the program: else others fill it
SECONDS_TO_REPORT = 3.0
CGROUP = Path("/sys/fs/cgroup")


def memory() -> tuple[int, int]:
    """Bytes that this machine, or the container's limit, has in all, and those that are free."""
    machine = psutil.virtual_memory()
    total = machine.total
    available = machine.available
    with suppress(OSError, ValueError):  # no such files, or no limit ("max")
        limit = int((CGROUP / "memory.max").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        used = int((CGROUP / "memory.current").read_text()) - int(statistics["inactive_file"])
        if limit < total:
            total = limit
            available = min(available, limit - used)
    return total, available


def held_by(process: int) -> int:
    """Bytes of the host's memory that belong to this process alone; 0 if there is none."""
    with suppress(psutil.Error):
        held = psutil.Process(process).memory_info()
        return int(held.rss - held.shared)
    return 0


def too_full(processes: Sequence[int]) -> str:
    """Why these processes have to end now; empty if they need not."""
    total, available = memory()
    if available >= LEAST_FREE * total:
        return ""
    sizes = [held_by(process) for process in processes]
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
    """An interrupt first, so that they report; then by force."""
    send(signal.SIGINT, processes)
    ends_at = time.monotonic() + SECONDS_TO_REPORT
    while any(map(held_by, processes)) and time.monotonic() < ends_at:
        time.sleep(0.1)
    send(signal.SIGKILL, processes)


def send(number: int, processes: Sequence[int]) -> None:
    """A signal to those that are still there."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
