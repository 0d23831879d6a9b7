"""Data loading: where the token blocks are kept, and which process makes batches of them."""

import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.measure.device import Device
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


def map_from_disk(dataset: Any) -> Any:
    """The same rows from files in TMPDIR that are mapped into memory; the files go with the dataset, or if it fails."""
    from datasets import load_from_disk

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="blocks-", ignore_cleanup_errors=True))
        dataset.save_to_disk(folder)
        mapped = load_from_disk(folder)
        weakref.finalize(mapped, stack.pop_all().close)  # from here on the files go with the dataset, not with an error
    return mapped


@dataclass(frozen=True)
class DataLoading(Technique):
    """The same batches in the same order, so the same losses; device memory is that of a batch, whoever makes it.

    Memory-mapped blocks are pages of a file, read when touched and dropped when the machine needs the room (datasets
    documentation, "Load"). Workers are processes that prepare the next batches meanwhile (`torch.utils.data`,
    "Multi-process data loading"). Pinned memory, the default on CUDA, is copied to the device without a detour.
    """

    memory_mapped: bool = setting(True, "blocks in a file that is mapped, instead of in the process's own memory")
    num_workers: int = setting(2, "processes that make batches; 0: the training process itself", minimum=0, maximum=64)
    pin_memory: bool = setting(True, "on CUDA: batches wait in page-locked host memory, as they do by default")

    stage = Stage.BATCHES
    forbids = frozenset({Capability.STREAM})

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.memory_mapped, self.num_workers, self.pin_memory) == (False, 0, True):
            raise ConfigurationError(f"{self.name}: this is how every recipe loads its data. Change one of the three.")

    def missing(self, device: Device) -> str | None:
        if not self.pin_memory and device.kind != "cuda":
            return (
                f"{self.name}: memory is pinned for copies to a CUDA device; on this device ({device.kind}) it never "
                "is. Leave pin_memory true, or run it where there is a CUDA device."
            )
        return None

    def dataset(self) -> Call | None:
        return Call(map_from_disk) if self.memory_mapped else None

    def training_arguments(self, arguments: Arguments) -> Arguments:
        arguments = {**arguments, "dataloader_num_workers": self.num_workers}
        if not self.pin_memory:
            arguments["dataloader_pin_memory"] = False
        return arguments
