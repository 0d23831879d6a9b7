"""Sizes that follow from values, which an emulated GPU lacks: a rule decides each, and a note keeps its line.

`h[labels != -100]` has as many rows as the mask has ones. PyTorch counts them on the card, and would count none. Here a
mask has the share of ones that EMULATED_MASKS names: 1 is all, an upper bound; 0 is none. A mask that is copied to the
host gets the same share.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

NOTES: dict[tuple[str, str], dict[str, Any]] = {}  # the key is a line and an operation
KEPT: list[Any] = []  # libraries of kernels: PyTorch drops the kernels when their library is freed


def share_of_ones() -> float:
    """Return the share of ones in a mask."""
    return float(os.environ.get("EMULATED_MASKS") or 1.0)


def decide_by_rule(torch: Any, program_line: Callable[[Any], str]) -> None:
    """Replace PyTorch's operations on CUDA whose results have such sizes.

    Args:
        program_line: finds the program's own line in frames as PyTorch's memory history has them.
    """

    def decide(operation: str, places: int | None, taken: int | None = None) -> int:
        """Note a size, and return it: `taken`, by default the share of ones of so many places."""
        if taken is None:
            taken = math.ceil(share_of_ones() * (places or 0))
        frames = []
        for frame, line_number in traceback.walk_stack(sys._getframe()):
            code = frame.f_code
            if code.co_filename != __file__:
                frames.append({"filename": code.co_filename, "line": line_number, "name": code.co_name})
        line = program_line(frames)
        note = NOTES.setdefault((line, operation), {"line": line, "operation": operation, "times": 0, "taken": -1})
        note["times"] += 1
        if taken > note["taken"]:
            note["taken"] = taken
            note["of"] = places
        return taken

    def nonzero(mask: Any) -> Any:
        count = decide("nonzero", mask.numel())
        return torch.empty((mask.dim(), count), dtype=torch.int64, device=mask.device).t()

    def unique(operation: str, values: Any, inverse: bool, counts: bool) -> Any:
        count = decide(operation, values.numel())
        none = torch.empty(0, dtype=torch.int64, device=values.device)
        return (
            values.new_empty(count),
            torch.empty(values.shape, dtype=torch.int64, device=values.device) if inverse else none,
            torch.empty(count, dtype=torch.int64, device=values.device) if counts else none,
        )

    def unique2(values: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
        return unique("unique", values, return_inverse, return_counts)

    def unique_consecutive(
        values: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
    ) -> Any:
        return unique("unique_consecutive", values, return_inverse, return_counts)

    def bincount(values: Any, weights: Any = None, minlength: int = 0) -> Any:
        count = decide("bincount", None, max(minlength, 1))
        dtype = torch.int64 if weights is None else torch.float64
        return torch.zeros(count, dtype=dtype, device=values.device)

    def repeat_interleave(repeats: Any, output_size: int | None = None) -> Any:
        if output_size is None:
            output_size = decide("repeat_interleave", None, math.ceil(share_of_ones() * repeats.numel()))
        return torch.zeros(output_size, dtype=repeats.dtype, device=repeats.device)

    def normal_of_tensors(mean: Any, std: Any, *, generator: Any = None) -> Any:
        """Draw without a check of `std`: PyTorch would ask the card whether each is positive, and it would say no."""
        shape = torch.broadcast_shapes(getattr(mean, "shape", ()), std.shape)
        values = torch.empty(shape, dtype=std.dtype, device=std.device)
        return values.normal_(generator=generator).mul_(std).add_(mean)

    kernels = {
        "nonzero": nonzero,
        "_unique2": unique2,
        "unique_consecutive": unique_consecutive,
        "bincount": bincount,
        "repeat_interleave.Tensor": repeat_interleave,
        "normal.Tensor_Tensor": normal_of_tensors,
        "normal.float_Tensor": normal_of_tensors,
    }
    library = torch.library.Library("aten", "IMPL")
    KEPT.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        for name, function in kernels.items():
            library.impl(name, function, "CUDA")

    def fill_masks(read: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that copies a tensor to the host, so that a mask arrives with its share of ones."""

        @functools.wraps(read)
        def read_mask(mask: Any, *args: Any, **kwargs: Any) -> Any:
            values = read(mask, *args, **kwargs)
            is_read = type(mask) is torch.Tensor and mask.dtype is torch.bool and mask.is_cuda and not values.is_cuda
            if is_read and mask.numel() > 1:  # a single value answers a yes/no question, and stays
                ones = decide("mask read by the host", mask.numel())
                values.copy_((torch.arange(mask.numel()) < ones).view(values.shape))
            return values

        return read_mask

    list_values = torch.Tensor.tolist
    torch.Tensor.to = fill_masks(torch.Tensor.to)
    torch.Tensor.cpu = fill_masks(torch.Tensor.cpu)
    torch.Tensor.tolist = lambda values: list_values(values.cpu() if values.dtype is torch.bool else values)


def generate_to_the_greatest_length(generation: Any) -> None:
    """Let transformers end every sequence at the greatest length that the program allows, an upper bound: it asks the
    card whether all have ended, which would say no for ever.

    Args:
        generation: the module `transformers.generation.utils`.
    """
    criterion = generation.MaxLengthCriteria
    mixin = generation.GenerationMixin
    # Before transformers 4.38 the length was compared on the host, and needs no patch.
    if not hasattr(mixin, "_has_unfinished_sequences"):
        return
    ask_length = criterion.__call__
    ask_card = mixin._has_unfinished_sequences
    is_over = False

    def compare_length(self: Any, input_ids: Any, scores: Any, **more: Any) -> Any:
        nonlocal is_over
        is_over = input_ids.shape[1] >= self.max_length
        return ask_length(self, input_ids, scores, **more)

    def goes_on(self: Any, this_peer_finished: Any, synced_gpus: bool, device: Any, **more: Any) -> bool:
        nonlocal is_over
        if device.type != "cuda":
            return bool(ask_card(self, this_peer_finished, synced_gpus, device, **more))
        was_over = is_over
        is_over = False
        return not was_over

    criterion.__call__ = compare_length
    mixin._has_unfinished_sequences = goes_on
