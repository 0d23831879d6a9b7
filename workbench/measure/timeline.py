"""Live bytes over a run, by category, as a tracker has seen them or a prediction has computed them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.categories import Category, Phase

LIVES = ("nbytes", "born", "died", "category", "maker")  # columns of a `TensorTimeline`


def live_bytes(lives: Mapping[str, NDArray[Any]], events: int) -> NDArray[np.int64]:
    """Return the live bytes of each category after every event, of shape (categories, events).

    Args:
        lives: columns of shape (storages,): `nbytes`, `category`, and the events `born` and `died` (-1: it lives).
            Every event is the birth or the end of exactly one storage, so that no two changes fall together.
    """
    sizes = lives["nbytes"]
    categories = lives["category"]
    ended = lives["died"] >= 0
    change = np.zeros((len(Category), events), dtype=np.int64)
    change[categories, lives["born"]] = sizes
    change[categories[ended], lives["died"][ended]] = -sizes[ended]
    return np.asarray(change.cumsum(axis=1))


def phases_of(events: int, starts: Sequence[tuple[int, Phase | None]]) -> tuple[Phase | None, ...]:
    """Return the phase of every event, from the pairs (first event, phase)."""
    indices = np.searchsorted([start for start, _ in starts], np.arange(events), side="right") - 1
    return tuple(starts[index][1] for index in indices)


@dataclass(frozen=True)
class Timeline:
    """Live bytes after every event. `live` has shape (categories, events), in the order of `Category`."""

    live: NDArray[np.int64]
    phases: tuple[Phase | None, ...]  # one per event

    @property
    def total(self) -> NDArray[np.int64]:
        return np.asarray(self.live.sum(axis=0))

    def peak(self, phase: Phase | None = None) -> int:
        """Return the index of the event with most live bytes, in one phase or in all; -1 if the phase has no event."""
        inside = np.array([phase is None or phase is other for other in self.phases], dtype=bool)
        if not inside.any():
            return -1
        return int(np.where(inside, self.total, -1).argmax())

    def by_category(self, event: int) -> dict[Category, int]:
        return dict(zip(Category, self.live[:, event].tolist(), strict=True))

    def maximum_by_category(self) -> dict[Category, int]:
        """Return each category's own maximum, whenever that was."""
        return dict(zip(Category, self.live.max(axis=1).tolist(), strict=True))


@dataclass(frozen=True)
class TensorTimeline(Timeline):
    """A timeline that knows the life of every tensor.

    Attributes:
        lives: a column under each name of `LIVES`, as `live_bytes` takes them.
        operations: names of operations; the column `maker` has, for every tensor, the index of the one that made it.
    """

    lives: dict[str, NDArray[Any]]
    operations: tuple[str, ...]
