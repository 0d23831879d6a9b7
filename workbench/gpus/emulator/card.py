"""The card that the stubs play: one environment variable has its fields of the catalogue."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from workbench.base.errors import ConfigurationError
from workbench.base.patches import change_environment
from workbench.gpus.catalogue import ENOUGH_BYTES, GPUS, MIB, Gpu
from workbench.gpus.catalogue import gpu as find_gpu

DEVICE = "emulated:"  # users name an emulated device `emulated:t4`
VARIABLE = "EMULATED_GPU"
# The driver gives these cards other names than their titles.
REAL_NAMES = {
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


def find_emulated_gpu(device: str) -> Gpu | None:
    """Return the card of `emulated:NAME`; None for another device. Raises ConfigurationError for an unknown card."""
    if not device.startswith(DEVICE):
        return None
    name = device.removeprefix(DEVICE)
    if not name:
        raise ConfigurationError(f"device: {DEVICE} needs the name of a GPU. Known: {', '.join(GPUS)}.")
    return find_gpu(name)


def with_memory(gpu: Gpu, memory_bytes: int) -> Gpu:
    """Return a card like this one with another amount of memory. Raises ConfigurationError if not even CUDA's context
    has room."""
    if memory_bytes <= gpu.context_bytes_estimate:
        raise ConfigurationError(
            f"memory: CUDA's context alone takes about {gpu.context_bytes_estimate // MIB} MiB of a card. Give it more."
        )
    return replace(gpu, memory_bytes=memory_bytes)


def name_on_a_card(gpu: Gpu) -> str:
    """Return the name that `torch.cuda.get_device_name()` says on a real card: some programs look for it."""
    if gpu.name in REAL_NAMES:
        return REAL_NAMES[gpu.name]
    name = re.sub(r" \d+ GB$", "", gpu.title).replace("Super", "SUPER").replace("Laptop", "Laptop GPU")
    return name if name.startswith("NVIDIA") else f"NVIDIA {name}"


def variable(gpu: Gpu, count: int = 1, name: str = "") -> str:
    """Write the text of `EMULATED_GPU`, which `stubs/emulator.c` reads.

    Args:
        count: the number of cards of this kind.
        name: the name that the cards say, by default the title with `(emulated)`.
    """
    fields = {
        "memory": gpu.memory_bytes,
        "context": gpu.context_bytes_estimate,
        "count": count,
        "major": gpu.compute_capability[0],
        "minor": gpu.compute_capability[1],
        "sms": gpu.multiprocessors,
        "l2": gpu.l2_bytes,
        **vars(gpu.multiprocessor),
        "name": name or f"{gpu.title} (emulated)",  # it stands last, since it contains blanks
    }
    return " ".join(f"{field}={value}" for field, value in fields.items())


def call_with_room(gpu: Gpu, function: Callable[[], R]) -> R:
    """Return what a function returns on the emulated GPU of this process; if that has no room, on one like it with
    `ENOUGH_BYTES`.

    Raises:
        torch.OutOfMemoryError: not even `ENOUGH_BYTES` are enough.
    """
    import torch  # late, since this module is also read where no PyTorch is installed

    try:
        return function()
    except torch.OutOfMemoryError:
        pass  # the second call stands outside of the handler, whose traceback would keep the tensors
    # The stubs read the variable at every question.
    with change_environment({VARIABLE: variable(replace(gpu, memory_bytes=ENOUGH_BYTES))}):
        return function()
