"""Data loading: where the token blocks are kept, and which process makes batches of them."""

import tempfile
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


def map_from_disk(dataset: Any) -> Any:
    """Write a dataset to files in TMPDIR, and return it mapped from them into memory.

    The files are deleted with the dataset that is returned, or if writing fails.
    """
    from datasets import load_from_disk

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="blocks-", ignore_cleanup_errors=True))
        dataset.save_to_disk(folder)
        mapped = load_from_disk(folder)
        # An error no longer deletes the files; the end of the dataset does.
        weakref.finalize(mapped, stack.pop_all().close)
    return mapped


@dataclass(frozen=True)
class DataLoading(Technique):
    """Batches are read and made in other ways, and stay the same in the same order: so the losses stay the same.

    Device memory holds one batch, whichever process made it. Memory-mapped blocks are pages of a file, read when
    touched and dropped when the machine needs the room (datasets documentation, "Load"). Workers are processes that
    prepare the next batches during a step (`torch.utils.data`, "Multi-process data loading").
    """

    memory_mapped: bool = setting(True, "blocks in a file that is mapped, instead of in the process's own memory")
    num_workers: int = setting(2, "processes that make batches; 0: the training process itself", minimum=0, maximum=64)

    retired = MappingProxyType({"pin_memory": True})
    stage = Stage.BATCHES
    forbids = frozenset({Capability.STREAM})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.memory_mapped and self.num_workers == 0:
            raise ConfigurationError(f"{self.name}: this is how every recipe loads its data. Change one of the two.")

    def dataset(self) -> Call | None:
        return Call(map_from_disk) if self.memory_mapped else None

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, "dataloader_num_workers": self.num_workers}
