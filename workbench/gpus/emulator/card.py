"""The card that the stubs play: fields of the catalogue as one environment variable."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from workbench.base.errors import ConfigurationError
from workbench.base.patches import changed_environment
from workbench.gpus.catalogue import ENOUGH_BYTES, GPUS, MIB, Gpu
from workbench.gpus.catalogue import gpu as find_gpu

DEVICE = "emulated:"  # a device of this program is called `emulated:t4`
VARIABLE = "EMULATED_GPU"
REAL_NAMES = {  # of those whose title is not what the driver says
    "t4": "Tesla T4",
    "p100": "Tesla P100-PCIE-16GB",
    "v100-16gb": "Tesla V100-SXM2-16GB",
    "v100-32gb": "Tesla V100-SXM2-32GB",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "h100": "NVIDIA H100 80GB HBM3",
    "rtx6000ada": "NVIDIA RTX 6000 Ada Generation",
}
R = TypeVar("R")


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


def name_on_a_card(gpu: Gpu) -> str:
    """What `torch.cuda.get_device_name()` says on a real one: programs look for it."""
    if gpu.name in REAL_NAMES:
        return REAL_NAMES[gpu.name]
    name = re.sub(r" \d+ GB$", "", gpu.title).replace("Super", "SUPER").replace("Laptop", "Laptop GPU")
    return name if name.startswith("NVIDIA") else f"NVIDIA {name}"


def variable(gpu: Gpu, count: int = 1, name: str = "") -> str:
    """The text of `EMULATED_GPU`, which `stubs/emulator.c` reads: so many cards of this kind, which say this name."""
    fields = {
        "memory": gpu.memory_bytes,
        "context": gpu.context_bytes_estimate,
        "count": count,
        "major": gpu.compute_capability[0],
        "minor": gpu.compute_capability[1],
        "sms": gpu.multiprocessors,
        "l2": gpu.l2_bytes,
        **vars(gpu.multiprocessor),
        "name": name or f"{gpu.title} (emulated)",  # the last one: it has blanks
    }
    return " ".join(f"{field}={value}" for field, value in fields.items())


def with_room(gpu: Gpu, function: Callable[[], R]) -> R:
    """What it returns on the card that this process sees; where that has no room, on one like it that has enough.

    Raises torch.OutOfMemoryError: not even `ENOUGH_BYTES` are enough.
    """
    import torch  # that of the process: this module is read without one, too

    try:
        return function()
    except torch.OutOfMemoryError:
        pass  # outside of the handler, whose traceback would keep the tensors
    # the stubs read it when asked
    with changed_environment({VARIABLE: variable(replace(gpu, memory_bytes=ENOUGH_BYTES))}):
        return function()
