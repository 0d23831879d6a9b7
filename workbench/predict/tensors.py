"""The life of every tensor of a step, and the live bytes that they add up to. Importing this does not import torch."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from workbench.measure.categories import Category, Phase
from workbench.measure.timeline import Timeline

LIVES = ("nbytes", "born", "died", "category", "maker")


@dataclass(frozen=True)
class TensorTimeline(Timeline):
    """A timeline that knows its tensors: arrays with one entry each and the names of `operations`, as in a `Trace`."""

    nbytes: NDArray[np.int64]
    born: NDArray[np.int64]
    died: NDArray[np.int64]
    category: NDArray[np.int8]
    maker: NDArray[np.int32]
    operations: tuple[str, ...]

    @classmethod
    def of(cls, phases: tuple[Phase | None, ...], operations: tuple[str, ...], **lives: NDArray[Any]) -> Self:
        """From the arrays named in `LIVES` and the phase of every event."""
        nbytes, born, died, category, _ = (lives[name] for name in LIVES)
        change = np.zeros((len(Category), len(phases)), dtype=np.int64)
        change[category, born] = nbytes  # every event is one birth or one end
        ended = died >= 0
        change[category[ended], died[ended]] = -nbytes[ended]
        return cls(change.cumsum(axis=1), phases, operations=operations, **lives)
