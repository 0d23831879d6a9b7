"""Live bytes over a run, by category: what a tracker has seen, or a prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.measure.categories import Category, Phase


def live_bytes(lives: Mapping[str, NDArray[Any]], events: int) -> NDArray[np.int64]:
    """Of each category after every event, from storages' `nbytes`, `category`, `born` and `died` (-1: they live).

    Every event is one birth or one end.
    """
    change = np.zeros((len(Category), events), dtype=np.int64)
    sizes, ended = lives["nbytes"], lives["died"] >= 0
    change[lives["category"], lives["born"]] = sizes
    change[lives["category"][ended], lives["died"][ended]] = -sizes[ended]
    return np.asarray(change.cumsum(axis=1))


def phases_of(events: int, starts: Sequence[tuple[int, Phase | None]]) -> tuple[Phase | None, ...]:
    """The phase of every event, from the event that each began with."""
    which = np.searchsorted([start for start, _ in starts], np.arange(events), side="right") - 1
    return tuple(starts[i][1] for i in which)


@dataclass(frozen=True)
class Timeline:
    """Live bytes after every event. `live` has shape (categories, events), in the order of `Category`."""

    live: NDArray[np.int64]
    phases: tuple[Phase | None, ...]  # one per event

    @property
    def total(self) -> NDArray[np.int64]:
        return np.asarray(self.live.sum(axis=0))

    def peak(self, phase: Phase | None = None) -> int:
        """Index of the event with most live bytes, in one phase if given. -1 if the phase has no event."""
        inside = np.array([phase is None or p is phase for p in self.phases], dtype=bool)
        return int(np.where(inside, self.total, -1).argmax()) if inside.any() else -1

    def by_category(self, event: int) -> dict[Category, int]:
        return {category: int(self.live[row, event]) for row, category in enumerate(Category)}
