"""The host of a life on an emulated GPU: its tensors and its files have sizes and no content.

An emulated card copies zeros to the host, which nobody reads. So large copies take no memory, a saved model is a file
with a hole in place of its tensors (safetensors' format), and `torch.serialization.skip_data` leaves such holes for the
optimizer's states. `host_bytes` misses one of those states at a time, which `torch.save` would bring to the host.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.base.patches.safetensors import write_files_by
from workbench.base.patches.transformers import make_arrays_by
from workbench.measure.tracker import Storage, StorageTracker
from workbench.prediction.rows import STEPS

LARGE = 2**20  # bytes: a copy to the host of at least this size gets no content


@contextmanager
def host_without_content() -> Iterator["HostTracker"]:
    """Keep content from the host's tensors and files, and yield the tracker of its bytes."""
    with write_files_by(_write_hole), make_arrays_by(_without_content), HostTracker() as host:
        yield host


class HostTracker(StorageTracker):
    """The tracker of the host's tensors: their bytes now, and at most.

    Tensors on `meta` count too: a model has them on the host before it is loaded.
    """

    kinds: ClassVar[tuple[str, ...]] = ("cpu", "meta")

    def __init__(self) -> None:
        super().__init__("cpu")
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = func is torch.ops.aten._to_copy.default and args[0].is_cuda and args[0].nbytes >= LARGE
        if copied and (kwargs or {}).get("device") == torch.device("cpu"):
            func = _empty_copy
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _watches(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type in self.kinds and tensor.layout is torch.strided

    def _book(self, tensor: torch.Tensor) -> Storage | None:
        storage = super()._book(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return storage

    def take(self) -> int:
        """Return the most bytes since the last call."""
        peak_bytes = self.peak_bytes
        self.peak_bytes = self.live_bytes
        return peak_bytes


def _empty_copy(tensor: torch.Tensor, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Return a tensor on the host for a copy that is not made."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype)


def _without_content(numpify: Any, tensors: Any) -> Any:
    """Return arrays of tensors as `numpify` does, but of logits and labels only tensors that have their shape.

    The latter are on `meta`, which the tracker counts and the machine does not hold.
    """

    def shape(tensor: torch.Tensor) -> Any:
        if tensor.ndim < 2:
            return numpify(tensor)
        held = torch.empty_like(tensor, device="meta")
        return held.to(torch.float32) if held.dtype is torch.bfloat16 else held  # NumPy has no bf16

    return tree_map(shape, tensors)


def move_without_content(trainer: Any, move: Any, checkpoint: str | None) -> None:
    """Save the optimizer's states without content, or load them: `move` is the Trainer's method that does either.

    Counts of steps stay on the host, and get the value that they would have.
    """
    with torch.serialization.skip_data():
        move(checkpoint)
    for state in tree_leaves(trainer.optimizer.state_dict()):
        if isinstance(state, torch.Tensor) and state.device.type == "cpu":
            state.fill_(STEPS)


def _write_hole(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Write a file of safetensors without its content (https://huggingface.co/docs/safetensors, "Format")."""
    header: dict[str, Any] = {"__metadata__": metadata or {}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += tensor.data_len
        header[name] = {"dtype": tensor.dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with Path(filename).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
