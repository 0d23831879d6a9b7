"""Patches of safetensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.base.patches import replace_attribute


@contextmanager
def write_files_by(write: Callable[..., Any]) -> Iterator[None]:
    """Let files be written by a function of (tensors, filename, metadata).

    Needed while safetensors 0.x writes the content of all tensors, which fake ones lack.
    """
    from safetensors import torch

    with replace_attribute(torch, "serialize_file", write):
        yield
