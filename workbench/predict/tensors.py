"""A timeline that knows its tensors. Importing this does not import torch."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from workbench.measure.timeline import Timeline

LIVES = ("nbytes", "born", "died", "category", "maker")


@dataclass(frozen=True)
class TensorTimeline(Timeline):
    """With the life of every tensor: under each name of `LIVES` an array, and `operations`, as in a `Trace`."""

    lives: dict[str, NDArray[Any]]
    operations: tuple[str, ...]
