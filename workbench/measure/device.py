"""The device of a run, as a value: a card that is not here is described in the same words as one that is."""

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.measure.emulated import emulated

if TYPE_CHECKING:
    import torch

CPU = "cpu"
KINDS = ("cuda", "mps", CPU)  # the fastest first
NATIVE_BF16 = (8, 0)  # from this compute capability on; PyTorch would emulate it on an older GPU


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
    def find(cls, kind: str | None = None) -> Self:
        """The device of this machine that is asked for, or the fastest there is.

        Raises:
            UnavailableError: it is not there.
            ConfigurationError: no such kind of device.
        """
        import torch

        kind = pick_device(kind).type
        if kind == "cuda":
            total_bytes = torch.cuda.mem_get_info()[1]
            capability = torch.cuda.get_device_capability()
            name = torch.cuda.get_device_name()
            if emulated() and not name.endswith("(emulated)"):  # under `emulate` a card says the name of a real one
                name = f"{name} (emulated)"
            return cls(kind, name, total_bytes, capability, in_software=emulated())
        if kind == CPU:
            return cls(kind, processor_name(), threads=torch.get_num_threads())
        return cls(kind, processor_name())

    @property
    def computes_bf16(self) -> bool:
        """False on a GPU on which PyTorch would only emulate bf16."""
        return self.compute_capability is None or self.compute_capability >= NATIVE_BF16

    @property
    def torch(self) -> "torch.device":
        import torch

        return torch.device(self.kind)

    def __str__(self) -> str:
        return device_text(self.kind, self.name, self.threads)


def device_text(kind: str, name: str, threads: int | None) -> str:
    """`NVIDIA A10 (cuda)`, `AMD EPYC (cpu, 2 threads)`: to be read by people, and never taken apart again."""
    if not kind:  # in a record of the oldest schema, whose name says all
        return name
    if threads:
        return f"{name} ({kind}, {threads} threads)"
    return f"{name} ({kind})"


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
    there = [kind for kind in KINDS if present[kind]]
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
