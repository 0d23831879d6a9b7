"""The card that the stubs play: fields of the catalogue as one environment variable."""

from dataclasses import replace

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS, MIB, Gpu
from workbench.gpus.catalogue import gpu as find_gpu

DEVICE = "emulated:"  # a device of this program is called `emulated:t4`
VARIABLE = "EMULATED_GPU"


def emulated_card(device: str) -> Gpu | None:
    """The card of `emulated:NAME`; None for another device. Raises ConfigurationError: unknown card."""
    if not device.startswith(DEVICE):
        return None
    name = device.removeprefix(DEVICE)
    if not name:
        raise ConfigurationError(f"device: {DEVICE} needs the name of a GPU. Known: {', '.join(GPUS)}.")
    return find_gpu(name)


def with_memory(gpu: Gpu, memory_bytes: int) -> Gpu:
    """The same card with another amount of memory. Raises ConfigurationError if not even the context has room."""
    if memory_bytes <= gpu.context_bytes_estimate:
        raise ConfigurationError(
            f"memory: CUDA's context alone takes about {gpu.context_bytes_estimate // MIB} MiB of a card. Give it more."
        )
    return replace(gpu, memory_bytes=memory_bytes)


def variable(gpu: Gpu, count: int = 1) -> str:
    """The text of `EMULATED_GPU`, which `stubs/emulator.c` reads: so many cards of this kind."""
    fields = {
        "memory": gpu.memory_bytes,
        "context": gpu.context_bytes_estimate,
        "count": count,
        "major": gpu.compute_capability[0],
        "minor": gpu.compute_capability[1],
        "sms": gpu.multiprocessors,
        **vars(gpu.multiprocessor),
        "name": f"{gpu.title} (emulated)",  # the last one: it has blanks
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())
