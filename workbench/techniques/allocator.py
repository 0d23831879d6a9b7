"""A setting of PyTorch's caching allocator on CUDA: it changes how memory is requested from the driver, not how much
is needed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from workbench.base.device import Device
from workbench.techniques.base import Arguments, Stage, Technique

# The two names of one variable, in the order in which PyTorch reads them; the first is the older one.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Allocator(Technique):
    """Expandable segments change what is reserved, not what is allocated: fewer free bytes are too small for a request.

    With expandable segments the allocator keeps one growing range of addresses and maps memory into it in pieces of
    2 MiB, instead of separate segments between which nothing can be merged. Source: PyTorch's notes "CUDA semantics",
    section "Optimizing memory usage".

    The variable is read once, when CUDA starts. A run sets and resets the same setting through the function that
    PyTorch's own tests use, so that a baseline in the same process stays one; the script sets the variable.
    """

    retired = MappingProxyType({"expandable_segments": True, "max_split_size_mb": None})
    stage = Stage.PROCESS

    def missing(self, device: Device) -> str | None:
        if device.kind != "cuda":
            return (
                f"{self.name}: these are settings of PyTorch's allocator for CUDA. On this device "
                f"({device.kind}) there is none to set. Run it where there is a CUDA device."
            )
        environment = _environment()
        if EXPANDABLE in environment:
            return (
                f"{self.name}: the environment already sets {environment!r}, for every run of this "
                f"process, so the baseline would have it too. Unset {' and '.join(VARIABLES)} and "
                "start Python again."
            )
        return None

    @contextmanager
    def run_context(self) -> Iterator[None]:
        import torch

        torch.cuda.empty_cache()  # the setting changes new segments alone
        set_allocator(f"{_environment()},{EXPANDABLE}")
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            set_allocator(f"expandable_segments:False,{_environment()}")

    def allocator_settings(self) -> Arguments:
        return {"expandable_segments": True}

    def environment(self) -> dict[str, str]:
        return {VARIABLES[0]: EXPANDABLE}


def _environment() -> str:
    """Return the allocator's settings in the user's own environment; empty if there are none."""
    for name in VARIABLES:
        if name in os.environ:
            return os.environ[name]
    return ""


def set_allocator(configuration: str) -> None:
    """Set the allocator's settings in a process that may already use CUDA. All others get their defaults."""
    import torch

    torch._C._accelerator_setAllocatorSettings(configuration.strip(","))
