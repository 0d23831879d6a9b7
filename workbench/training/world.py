"""The world of a run: how many ranks share it, which one this is, and the device it trains on.

A launcher such as torchrun starts several processes and tells each of them, in environment variables, which rank it is
and how many there are. PyTorch is imported only where a device is looked at, so that a refusal comes at once.
"""

import os
from dataclasses import dataclass
from typing import Any, Self

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError

# what a process that is alone finds there, if anything: torchrun's, MPI's and Slurm's; Accelerate reads most of them
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
ALONE = dict.fromkeys(SIZES, "1") | dict.fromkeys(RANKS, "0") | {"LOCAL_RANK": "-1"}
# how their names begin; the Trainer obeys them
ACCELERATES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_")


@dataclass(frozen=True)
class World:
    """Where a run takes place: a device, and the ranks that share the run."""

    device: Device
    rank: int = 0
    world_size: int = 1
    shard: str = ""  # of several ranks: what each of them keeps

    @classmethod
    def find(cls, device_name: str | None = None) -> Self:
        """This process, alone, with the kind of device asked for, or the fastest there is. Raises as `Device.find`."""
        return cls(Device.find(device_name))

    def facts(self) -> dict[str, Any]:
        """Fields of a record."""
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "shard": self.shard,
            "device_kind": self.device.kind,
            "device_name": self.device.name,
            "device_bytes": self.device.total_bytes,
            "threads": self.device.threads,
        }


def refuse_several_ranks() -> None:
    """For what one process does alone: each rank would train a batch of its own and record it as the whole.

    A single rank under torchrun is refused too: the Trainer would wrap the model in DistributedDataParallel, whose
    buckets take as much memory as the gradients. So are settings of `accelerate launch`, which no record would show.

    Raises:
        ConfigurationError: a launcher started this process, or its variables say nothing that makes sense.
    """
    for name in (*ALONE, *sorted(os.environ)):
        value = os.environ.get(name, ALONE.get(name, ""))
        is_switch = name.startswith(ACCELERATES) and value.lower() not in ("no", "false", "0", "")
        if is_switch or value != ALONE.get(name, value):
            raise ConfigurationError(
                f"run: {name}={value:.40} in the environment says that a launcher, such as "
                "torchrun, started this process: it would train otherwise than its record says. "
                "Start several ranks with `workbench run --ranks N`; without a launcher, unset "
                f"{name}."
            )
