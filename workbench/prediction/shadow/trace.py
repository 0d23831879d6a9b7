"""The trace of a shadow: for every storage its size, when it began and ended, its category, and who made it.

A trace can be made longer without tracing: a third step repeats the second, and the last evaluation the first.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.categories import Category, Phase
from workbench.gpus.catalogue import Gpu
from workbench.measure.timeline import LIVES, TensorTimeline, live_bytes, phases_of
from workbench.prediction.shadow.reductions import Reduction

REPEATED = ("nbytes", "category", "maker")  # arrays of a trace in which a repeated storage has the same entries again
# Numbers of the categories in which a step's batch, loss and norm are.
PASSING = list(map([*Category].index, (Category.ACTIVATIONS, Category.TEMPORARIES)))
Column = NDArray[np.int64]  # (storages,) or (events,)
Events = tuple[int, int]  # two readings of the event clock, the second one excluded


@dataclass(frozen=True, eq=False)
class Trace:
    """Every allocation and free of a training, independent of any GPU's allocator. A trace is equal to itself alone.

    Attributes:
        nbytes, born, died, category, maker: an entry for each storage. `born` and `died` are readings of the event
            clock, which has one event a reading; `died` is -1 for what outlives the trace. `category` and `maker` are
            numbers, of `Category` and of `operations`.
        phase_starts: readings of the clock, each with the phase that began there.
        workspaces: the storages of cuBLAS, whose size the GPU decides: it is 0 here.
        shared: the reductions whose scratch the GPU decides, each under the first of its two storages.
        work: what the last step asked of the device (`ShadowTracker.work_so_far`).
        allocator: the settings of the allocator that techniques change.
        attention: each question that was asked to choose a kernel, and its answer.
        facts: the fields of a `Prediction` that are known from the Trainer.
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
        """The number of allocations and frees."""
        return len(self.born) + int((self.died >= 0).sum())

    def sizes(self, gpu: Gpu | None) -> Column:
        """Return the bytes of every storage on this GPU, (storages,). None counts tensors alone, as a CPU has them."""
        sizes = self.nbytes.copy()
        if gpu is not None:
            sizes[list(self.workspaces)] = gpu.cublas_workspace_bytes
            bytes_of = {work: work.bytes_on(gpu) for work in set(self.shared.values())}
            for first, work in self.shared.items():
                sizes[first : first + 2] = bytes_of[work]
        return sizes

    def phases(self) -> tuple[Phase | None, ...]:
        """Return the phase of every event."""
        return phases_of(self.events, self.phase_starts)

    def timeline(self, sizes: Column) -> TensorTimeline:
        """Return live bytes by category after every event, and each tensor's part in them."""
        lives = {name: getattr(self, name) for name in LIVES} | {"nbytes": sizes}
        return TensorTimeline(live_bytes(lives, self.events), self.phases(), lives, self.operations)


# ---- steps that are foreseen ----


def foresee(trace: Trace, evaluation: Events, step: Events) -> Trace | None:
    """Return the trace with one step more and an evaluation at its end, or None where they cannot be foreseen.

    They can be if everything that the step leaves alive replaces something which it freed of the step before, and if of
    the evaluation only workspaces live on.

    Args:
        evaluation: the events of the evaluation that is repeated.
        step: the events of the step that is repeated.
    """
    longer = _repeat(trace, step, ())
    if longer:
        # After the training nobody holds the batch, the loss and the norm of the last step any longer.
        left = (longer.born >= trace.events) & (longer.died < 0) & np.isin(longer.category, PASSING)
        longer.died[left] = longer.events + np.arange(left.sum())
    return longer and _repeat(longer, evaluation, trace.workspaces)


def _repeat(trace: Trace, window: Events, once: tuple[int, ...]) -> Trace | None:
    """Return the trace with the events of a window once more at its end, or None where they would not be the same.

    Args:
        once: storages of the window that are not made a second time.
    """
    begin, end = window
    born = (trace.born >= begin) & (trace.born < end)
    born[list(once)] = False
    freed = (trace.died >= begin) & (trace.died < end)
    left = np.flatnonzero(born & ~freed)
    taken = np.flatnonzero(freed & ~born)
    copied = np.flatnonzero(born)
    longer: dict[str, Any] = {}
    for name in REPEATED:
        column = getattr(trace, name)
        # Whatever is left must equal what it replaces: in sizes, categories and operations, and in their order.
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
            starts = [(int(later(begin)), phase)]  # the phase within which the window begins
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
