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

KINDS = ("cuda", "mps", "cpu")  # of devices, the fastest first
# what a process that is alone finds there, if anything: torchrun's, MPI's and Slurm's; Accelerate reads most of them
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
ALONE = dict.fromkeys(SIZES, "1") | dict.fromkeys(RANKS, "0") | {"LOCAL_RANK": "-1"}
ACCELERATES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_")  # how their names begin; the Trainer obeys them


@dataclass(frozen=True)
class World:
    """Where a run takes place; its record has fields of the same names."""

    rank: int
    world_size: int
    device_kind: str  # cuda, cpu or mps
    device_name: str  # of the GPU or the processor
    threads: int | None  # PyTorch's, on a CPU; None on an accelerator
    shard: str = ""  # of several ranks: what each of them keeps

    @classmethod
    def find(cls, device: str | None = None) -> Self:
        """This process, alone, with the device asked for, or the fastest there is.

        Raises:
            UnavailableError: the device is not there.
            ConfigurationError: no such kind of device.
        """
        import torch

        kind = pick_device(device).type
        name = torch.cuda.get_device_name() if kind == "cuda" else _processor()
        return cls(0, 1, kind, name, torch.get_num_threads() if kind == "cpu" else None)

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device(self.device_kind)

    def __str__(self) -> str:
        return device_text(self.device_kind, self.device_name, self.threads)


def refuse_several_ranks() -> None:
    """For what one process does alone: each rank would train a batch of its own and record it as the whole.

    A single rank under torchrun is refused too: the Trainer would wrap the model in DistributedDataParallel, whose
    buckets take as much memory as the gradients. So are settings of `accelerate launch`, which no record would show.

    Raises:
        ConfigurationError: a launcher started this process, or its variables say nothing that makes sense.
    """
    telling = [name for name, alone in ALONE.items() if os.environ.get(name, alone) != alone]
    known = ((name, os.environ[name].lower()) for name in sorted(os.environ) if name.startswith(ACCELERATES))
    telling += [name for name, value in known if value not in ("no", "false", "0", "")]
    if telling:
        raise ConfigurationError(
            f"run: {telling[0]}={os.environ[telling[0]]:.40} in the environment says that a launcher, such as "
            "torchrun, started this process: it would train otherwise than its record says. Start several ranks with "
            f"`workbench run --ranks N`, or that command under torchrun; without a launcher, unset {telling[0]}."
        )


def check_device(name: str | None) -> None:
    """Raises ConfigurationError for a kind of device that there is nowhere; PyTorch is not asked."""
    if name not in (None, *KINDS):
        raise ConfigurationError(f"device: {name!r} is not one of {', '.join(KINDS)}, emulated:GPU.")


def pick_device(name: str | None = None) -> "torch.device":
    """The device asked for, or the fastest there is.

    Raises:
        UnavailableError: it is not there.
        ConfigurationError: no such kind of device.
    """
    import torch

    check_device(name)
    known = zip(KINDS, (torch.cuda.is_available(), torch.backends.mps.is_available(), True), strict=True)
    there = [kind for kind, present in known if present]
    if name not in (None, *there):
        raise UnavailableError(f"device: PyTorch sees no {name} device on this machine. Use --device cpu.")
    return torch.device(name or there[0])


def describe_device(device: "torch.device") -> str:
    """`NVIDIA A10 (cuda)`, or the processor with the number of threads PyTorch uses."""
    return str(World.find(device.type))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
