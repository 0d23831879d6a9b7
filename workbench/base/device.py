"""The device of a run, as a value: a GPU that this machine lacks is described in the same words as one that it has."""

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from workbench.base.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    import torch

CPU = "cpu"
KINDS = ("cuda", "mps", CPU)  # kinds of devices, the fastest first
NATIVE_BF16 = (8, 0)  # the first compute capability with bf16; PyTorch would compute it in software on an older GPU
NOT_COMPUTED = "emulated GPU: nothing was computed, so there is no loss, no text and no speed"


@dataclass(frozen=True)
class Device:
    """The device that a run trains on, as far as a run has to know it.

    Attributes:
        kind: `"cuda"`, `"mps"` or `"cpu"`.
        name: the name of the GPU or of the processor.
        total_bytes: the memory of a CUDA device; None where memory is shared with everything else.
        compute_capability: for a CUDA device, as (8, 0); else None.
        threads: the number of threads that PyTorch uses on a CPU; else None.
        emulated_gpu: the catalogue's name of an emulated GPU, which keeps the books of memory and computes nothing;
            empty for a real device.
    """

    kind: str
    name: str = ""
    total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    threads: int | None = None
    emulated_gpu: str = ""

    @classmethod
    def find(cls, name: str | None = None) -> Self:
        """Return the device of this machine that has this name, by default the fastest one.

        Raises:
            UnavailableError: this machine has no such device.
            ConfigurationError: there is no such kind of device.
        """
        import torch

        device_type = pick_device(name).type
        if device_type == "cuda":
            total_bytes = torch.cuda.mem_get_info()[1]
            capability = torch.cuda.get_device_capability()
            gpu_name = torch.cuda.get_device_name()
            # An emulated GPU of the command `emulate` says the name of a real one.
            if current_emulated_gpu() and not gpu_name.endswith("(emulated)"):
                gpu_name = f"{gpu_name} (emulated)"
            return cls(device_type, gpu_name, total_bytes, capability, emulated_gpu=current_emulated_gpu())
        threads = torch.get_num_threads() if device_type == CPU else None
        return cls(device_type, processor_name(), threads=threads)

    @property
    def computes_bf16(self) -> bool:
        """Whether the device has bf16: False on a GPU on which PyTorch would compute it in software."""
        return self.compute_capability is None or self.compute_capability >= NATIVE_BF16

    @property
    def torch(self) -> "torch.device":
        import torch

        return torch.device(self.kind)

    def __str__(self) -> str:
        """Describe the device for people: `NVIDIA A10 (cuda)`, `AMD EPYC (cpu, 2 threads)`. No program takes the text
        apart again."""
        if not self.kind:  # a record of the oldest schema has no kind: its name says all
            return self.name
        if self.threads:
            return f"{self.name} ({self.kind}, {self.threads} threads)"
        return f"{self.name} ({self.kind})"


def current_emulated_gpu() -> str:
    """Return the catalogue's name of the emulated GPU (`workbench.gpus.emulator`) that this process runs on; empty on
    real devices. The environment is read each time, since a fork of this process may have another GPU."""
    return os.environ.get("EMULATED_CARD", "")


def check_device(name: str | None) -> None:
    """Raise a ConfigurationError for a kind of device that exists nowhere. PyTorch is not asked."""
    if name not in (None, *KINDS):
        raise ConfigurationError(f"device: {name!r} is not one of {', '.join(KINDS)}, emulated:GPU.")


def pick_device(name: str | None = None) -> "torch.device":
    """Return the device of this kind, by default the fastest one of this machine.

    Raises:
        UnavailableError: this machine has no such device.
        ConfigurationError: there is no such kind of device.
    """
    import torch

    check_device(name)
    is_present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    present = list(filter(is_present.get, KINDS))
    if name not in (None, *present):
        raise UnavailableError(f"device: PyTorch sees no {name} device on this machine. Use --device cpu.")
    return torch.device(name or present[0])


def describe_device(device: "torch.device") -> str:
    """Describe a device: `NVIDIA A10 (cuda)`, or the processor with the number of threads that PyTorch uses."""
    return str(Device.find(device.type))


def list_real_gpus() -> list[str]:
    """Return the name, memory and driver of each of NVIDIA's GPUs that this machine has, as `nvidia-smi` writes them;
    none if there is no such program, or it does not answer."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor() or platform.machine()
