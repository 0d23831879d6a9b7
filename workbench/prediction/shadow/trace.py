"""What a shadow returns: of every storage of a step its size, when it began and ended, its category, who made it. And
what it goes on with, foreseen: a third step is the second again, the evaluation after it the one before it."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.categories import Category, Phase
from workbench.gpus.catalogue import Gpu
from workbench.measure.timeline import LIVES, TensorTimeline, live_bytes, phases_of
from workbench.prediction.shadow.reductions import Reduction

ALIKE = ("nbytes", "category", "maker")  # arrays of a trace: what a repeated storage has again
PASSING = list(map([*Category].index, (Category.ACTIVATIONS, Category.TEMPORARIES)))
Column = NDArray[np.int64]  # a number for each storage, or for each event
Events = tuple[int, int]  # from one reading of the clock up to another


@dataclass(frozen=True, eq=False)
class Trace:
    """Every allocation and free of a step, independent of any GPU's allocator. Equal to itself alone.

    Arrays have one entry per storage; `born` and `died` are readings of the event clock, one event a reading, and
    `died` is -1 for what outlives the trace. Some sizes only the GPU knows, 0 here: `workspaces` are such storages, and
    `shared` names the first of two.
    `allocator` holds the allocator's settings that techniques change, `attention` each question that was asked in the
    choice of a kernel and its answer, `work` what the last step asked of the device (`ShadowTracker.worked`), `facts`
    the fields of a `Prediction` that are known from the assembled trainer.
    """

    nbytes: Column
    born: Column
    died: Column
    category: Column
    maker: NDArray[np.int32]
    operations: tuple[str, ...]
    phase_starts: tuple[tuple[int, Phase | None], ...]
    workspaces: tuple[int, ...]
    shared: dict[int, Reduction] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    allocator: dict[str, Any] = field(default_factory=dict)
    attention: dict[Any, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return len(self.born) + int((self.died >= 0).sum())

    def sizes(self, gpu: Gpu | None) -> Column:
        """The bytes of every storage on this GPU; without one, of tensors alone."""
        sizes = self.nbytes.copy()
        if gpu is not None:
            sizes[list(self.workspaces)] = gpu.cublas_workspace_bytes
            bytes_of = {work: work.bytes_on(gpu) for work in set(self.shared.values())}
            for first, work in self.shared.items():
                sizes[first : first + 2] = bytes_of[work]
        return sizes

    def phases(self) -> tuple[Phase | None, ...]:
        """The phase of every event."""
        return phases_of(self.events, self.phase_starts)

    def timeline(self, sizes: Column) -> TensorTimeline:
        """Live bytes by category after every event, and each tensor's part in them."""
        lives = {name: getattr(self, name) for name in LIVES} | {"nbytes": sizes}
        return TensorTimeline(live_bytes(lives, self.events), self.phases(), lives, self.operations)


# ---- what is foreseen ----


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
    copied = np.flatnonzero(born)
    longer: dict[str, Any] = {}
    for name in ALIKE:
        column = getattr(trace, name)
        # the same sizes, for the same, from the same operations, in the same order
        if not np.array_equal(column[left], column[taken]):
            return None
        longer[name] = np.append(column, column[copied])
    times = np.sort(np.concatenate([trace.born[born], trace.died[freed]]))

    def later(events: Any) -> Any:
        return trace.events + np.searchsorted(times, events)

    died = trace.died.copy()
    died[left] = later(trace.died[taken])
    starts: list[tuple[int, Phase | None]] = []
    for at, phase in trace.phase_starts:
        if at <= begin:
            starts = [(int(later(begin)), phase)]  # the window begins within this phase
        elif at <= end:
            starts.append((int(later(at)), phase))
    shared = dict(trace.shared)
    for place, index in enumerate(copied.tolist(), len(trace.born)):
        if index in trace.shared:
            shared[place] = trace.shared[index]
    return replace(
        trace,
        **longer,
        born=np.append(trace.born, later(trace.born[copied])),
        died=np.append(died, np.where(freed[copied], later(trace.died[copied]), -1)),
        phase_starts=(*trace.phase_starts, *starts),
        shared=shared,
    )
