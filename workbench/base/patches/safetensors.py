"""What is replaced in safetensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from workbench.base.patches import replaced


@contextmanager
def files_written_by(write: Callable[..., Any]) -> Iterator[None]:
    """Files are written by this function of (tensors, filename, metadata). While safetensors 0.x writes all content."""
    from safetensors import torch

    with replaced(torch, "serialize_file", write):
        yield
