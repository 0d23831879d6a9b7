"""The device of a run, as a value: a card that is not here is described in the same words as one that is."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from workbench.base.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    import torch

CPU = "cpu"
KINDS = ("cuda", "mps", CPU)  # the fastest first
NATIVE_BF16 = (8, 0)  # from this compute capability on; PyTorch would emulate it on an older GPU
NOT_COMPUTED = "emulated GPU: nothing was computed, so there is no loss, no text and no speed"


@dataclass(frozen=True)
class Device:
    """What a run has to know of the device it trains on.

    Attributes:
        kind: `"cuda"`, `"mps"` or `"cpu"`.
        name: that of the GPU or of the processor.
        total_bytes: the memory of a CUDA device; None where memory is shared with everything else.
        compute_capability: of a CUDA device, for example (8, 0).
        threads: that PyTorch uses, on a CPU.
        in_software: the catalogue's name of an emulated card, which allocates and computes nothing; else empty.
    """

    kind: str
    name: str = ""
    total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    threads: int | None = None
    in_software: str = ""

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """The device of this machine that is asked for, or the fastest there is.

        Raises:
            UnavailableError: it is not there.
            ConfigurationError: no such kind of device.
        """
        import torch

        device_type = pick_device(name).type
        if device_type == "cuda":
            total_bytes = torch.cuda.mem_get_info()[1]
            capability = torch.cuda.get_device_capability()
            card = torch.cuda.get_device_name()
            # under `emulate` a card says the name of a real one
            if emulated() and not card.endswith("(emulated)"):
                card = f"{card} (emulated)"
            return cls(device_type, card, total_bytes, capability, in_software=emulated())
        threads = torch.get_num_threads() if device_type == CPU else None
        return cls(device_type, processor_name(), threads=threads)

    @property
    def computes_bf16(self) -> bool:
        """False on a GPU on which PyTorch would only emulate bf16."""
        return self.compute_capability is None or self.compute_capability >= NATIVE_BF16

    @property
    def torch(self) -> "torch.device":
        import torch

        return torch.device(self.kind)

    def __str__(self) -> str:
        """`NVIDIA A10 (cuda)`, `AMD EPYC (cpu, 2 threads)`: to be read by people, and never taken apart again."""
        if not self.kind:  # in a record of the oldest schema, whose name says all
            return self.name
        if self.threads:
            return f"{self.name} ({self.kind}, {self.threads} threads)"
        return f"{self.name} ({self.kind})"


def emulated() -> str:
    """The name of the card in software (`workbench.gpus.emulator`) that this process runs on, or nothing: it keeps
    books and computes nothing. Asked anew each time: a fork of this process may play another."""
    return os.environ.get("EMULATED_CARD", "")


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
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    there = list(filter(present.get, KINDS))
    if name not in (None, *there):
        raise UnavailableError(f"device: PyTorch sees no {name} device on this machine. Use --device cpu.")
    return torch.device(name or there[0])


def describe_device(device: "torch.device") -> str:
    """`NVIDIA A10 (cuda)`, or the processor with the number of threads PyTorch uses."""
    return str(Device.find(device.type))


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()
