"""Which device to train on, and what to call it in a record."""

import platform
from pathlib import Path

import torch

from workbench.errors import ConfigurationError, UnavailableError


def pick_device(name: str | None = None) -> torch.device:
    """The device asked for, or the fastest there is.

    Raises:
        UnavailableError: it is not there.
        ConfigurationError: no such kind of device.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(kind for kind, present in there.items() if present))
    if name not in there:
        raise ConfigurationError(f"device: {name!r} is not one of {', '.join(there)}.")
    if not there[name]:
        raise UnavailableError(f"device: PyTorch sees no {name} device on this machine. Use --device cpu.")
    return torch.device(name)


def describe_device(device: torch.device) -> str:
    """`NVIDIA A10 (cuda)`, or the processor with the number of threads PyTorch uses."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name()} (cuda)"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return f"{_processor()} ({device.type}{threads})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
