"""The world of a run: how many ranks share it, which one this is, and the device it trains on.

A launcher such as torchrun starts several processes and tells each of them, in environment variables, which rank it is
and how many there are. PyTorch is imported only to find a device, so that a refusal comes at once.
"""

import os
from dataclasses import dataclass
from typing import Any, Self

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError

# Variables in which launchers (torchrun, MPI, Slurm) say how many ranks there are, and which one a process is.
# Accelerate reads most of them. ALONE has the value that each must have, if any, for a process that is alone.
SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS")
RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
ALONE = dict.fromkeys(SIZES, "1") | dict.fromkeys(RANKS, "0") | {"LOCAL_RANK": "-1"}
# Switches of `accelerate launch`, by the beginnings of their names; the Trainer obeys them.
ACCELERATE_SWITCHES = ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_")


@dataclass(frozen=True)
class World:
    """The device that this process trains on, and its place among the ranks that share the run.

    Attributes:
        rank: which of them this process is, from 0.
        shard: what each of several ranks keeps, a name of `ranks/shards.toml`; empty for a process alone.
    """

    device: Device
    rank: int = 0
    world_size: int = 1
    shard: str = ""

    @classmethod
    def find(cls, device_name: str | None = None) -> Self:
        """Return the world of this process alone, with the kind of device asked for, or the fastest there is. Raises as
        `Device.find`."""
        return cls(Device.find(device_name))

    def facts(self) -> dict[str, Any]:
        """Return fields of a record."""
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
    """Refuse to do alone what several ranks were started for: each would train a batch of its own, and record it as the
    whole.

    A single rank under torchrun is refused too: the Trainer would wrap the model in DistributedDataParallel, whose
    buckets take as much memory as the gradients. So are settings of `accelerate launch`, which no record would show.

    Raises:
        ConfigurationError: a launcher started this process, or its variables say nothing that makes sense.
    """
    by_launcher = [name for name, value in ALONE.items() if os.environ.get(name, value) != value]
    for name, value in sorted(os.environ.items()):
        if name.startswith(ACCELERATE_SWITCHES) and value.lower() not in ("no", "false", "0", ""):
            by_launcher.append(name)
    for name in by_launcher:
        raise ConfigurationError(
            f"run: {name}={os.environ[name]:.40} in the environment says that a launcher, such as "
            "torchrun, started this process: it would train otherwise than its record says. "
            "Start several ranks with `workbench run --ranks N`; without a launcher, unset "
            f"{name}."
        )
