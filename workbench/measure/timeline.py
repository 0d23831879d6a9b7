"""Live bytes over a run, by category: what a tracker has seen, or a prediction."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workbench.measure.categories import Category, Phase


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
