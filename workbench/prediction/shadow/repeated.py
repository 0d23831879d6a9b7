"""What a trace goes on with, foreseen: a third step is the second again, the evaluation after it the one before it."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.categories import Category
from workbench.prediction.shadow.trace import Trace

ALIKE = ("nbytes", "category", "maker")  # arrays of a trace: what a repeated storage has again
PASSING = [[*Category].index(category) for category in (Category.ACTIVATIONS, Category.TEMPORARIES)]
Events = tuple[int, int]  # from one reading of the clock up to another


def foreseen(trace: Trace, evaluation: Events, step: Events) -> Trace | None:
    """The trace with a step more, and an evaluation; None where what is there does not tell.

    It does if all that the step leaves alive takes the place of what it freed of the step before, and if nothing that
    the evaluation made lives on but workspaces.
    """
    longer = _again(trace, step, ())
    if longer:
        # when training is over, nobody holds the batch, the loss and the norm of the last step any longer
        left = (longer.born >= trace.events) & (longer.died < 0) & np.isin(longer.category, PASSING)
        longer.died[left] = longer.events + np.arange(left.sum())
    return longer and _again(longer, evaluation, trace.workspaces)


def _again(trace: Trace, window: Events, once: tuple[int, ...]) -> Trace | None:
    """With the events of the window once more, at the end. `once`: storages that are not made a second time."""
    begin, end = window
    born = (trace.born >= begin) & (trace.born < end)
    born[list(once)] = False
    freed = (trace.died >= begin) & (trace.died < end)
    left = np.flatnonzero(born & ~freed)
    taken = np.flatnonzero(freed & ~born)
    if not _alike(trace, left, taken):
        return None
    copied = np.flatnonzero(born)
    count = len(trace.born)
    times = np.sort(np.concatenate([trace.born[born], trace.died[freed]]))

    def later(events: Any) -> Any:
        return trace.events + np.searchsorted(times, events)

    died = trace.died.copy()
    died[left] = later(trace.died[taken])
    place = {int(index): count + number for number, index in enumerate(copied)}
    again: dict[str, Any] = {name: np.append(getattr(trace, name), getattr(trace, name)[copied]) for name in ALIKE}
    before = [phase for at, phase in trace.phase_starts if at <= begin][-1]
    starts = [(begin, before), *((at, phase) for at, phase in trace.phase_starts if begin <= at <= end)]
    return replace(
        trace,
        **again,
        born=np.append(trace.born, later(trace.born[copied])),
        died=np.append(died, np.where(freed[copied], later(trace.died[copied]), -1)),
        phase_starts=(*trace.phase_starts, *((int(later(at)), phase) for at, phase in starts)),
        shared=trace.shared | {place[first]: work for first, work in trace.shared.items() if first in place},
    )


def _alike(trace: Trace, some: NDArray[np.int64], others: NDArray[np.int64]) -> bool:
    """The same sizes, for the same, from the same operations, in the same order."""
    return all(np.array_equal(getattr(trace, name)[some], getattr(trace, name)[others]) for name in ALIKE)
