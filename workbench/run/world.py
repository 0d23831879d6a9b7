"""The world of a run: how many ranks share it, which one this is, and the device it trains on.

A launcher such as torchrun starts several processes and tells each of them, in environment variables, which rank it is
and how many there are. PyTorch is imported only where a device is looked at, so that a refusal comes at once.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from workbench.errors import ConfigurationError, UnavailableError
from workbench.records.record import device_text

if TYPE_CHECKING:
    import torch

# torchrun's and MPI's, as Accelerate reads them to decide how it trains
SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LAUNCHERS_VARIABLES = ("RANK", "LOCAL_RANK", *SIZE_VARIABLES)


@dataclass(frozen=True)
class World:
    """Where a run takes place; its record has fields of the same names."""

    rank: int
    world_size: int
    device_kind: str  # cuda, cpu or mps
    device_name: str  # of the GPU or the processor
    threads: int | None  # PyTorch's, on a CPU; None on an accelerator

    @classmethod
    def find(cls, device: str | None = None) -> Self:
        """This process with the device asked for, or the fastest there is.

        Raises:
            UnavailableError: the device is not there.
            ConfigurationError: no such kind of device, or a launcher's variable that is no number.
        """
        return cls.of(pick_device(device))

    @classmethod
    def of(cls, device: "torch.device") -> Self:
        """This process with that device."""
        import torch

        name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
        threads = torch.get_num_threads() if device.type == "cpu" else None
        world_size = max(_number(name, 1) for name in SIZE_VARIABLES)
        return cls(_number("RANK", 0), world_size, device.type, name, threads)

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.device_kind)

    def __str__(self) -> str:
        return device_text(self.device_kind, self.device_name, self.threads)


def refuse_several_ranks() -> None:
    """Runs on several ranks are not built yet: each rank would train a batch of its own and record it as the whole.

    A single rank under torchrun is refused too: the Trainer would wrap the model in DistributedDataParallel, whose
    buckets take as much memory as the gradients.

    Raises:
        ConfigurationError: a launcher started this process, or one of its variables is no number.
    """
    telling = [name for name in SIZE_VARIABLES if _number(name, 1) > 1]
    telling += ["LOCAL_RANK"] if os.environ.get("LOCAL_RANK", "-1") != "-1" else []
    if telling:
        raise ConfigurationError(
            f"run: {telling[0]}={os.environ[telling[0]]} in the environment says that a launcher, such as torchrun, "
            "started this process as one of its ranks. Runs on several ranks cannot be measured yet. Start it once, "
            f"without the launcher; if there was none, unset {telling[0]}."
        )


def _number(variable: str, least: int) -> int:
    """A launcher's variable; the least that it can be where it is not set."""
    text = os.environ.get(variable, str(least))
    if not text.strip().isdecimal() or int(text) < least:
        raise ConfigurationError(
            f"run: {variable} is {text!r:.40} in the environment, not a number from {least}. Unset it."
        )
    return int(text)


def pick_device(name: str | None = None) -> "torch.device":
    """The device asked for, or the fastest there is.

    Raises:
        UnavailableError: it is not there.
        ConfigurationError: no such kind of device.
    """
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name is None:
        return torch.device(next(kind for kind, present in there.items() if present))
    if name not in there:
        raise ConfigurationError(f"device: {name!r} is not one of {', '.join(there)}.")
    if not there[name]:
        raise UnavailableError(f"device: PyTorch sees no {name} device on this machine. Use --device cpu.")
    return torch.device(name)


def describe_device(device: "torch.device") -> str:
    """`NVIDIA A10 (cuda)`, or the processor with the number of threads PyTorch uses."""
    return str(World.of(device))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
