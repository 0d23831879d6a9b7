"""What a shadow returns: of every storage of a step its size, when it began and ended, its category, who made it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.base.categories import Phase
from workbench.gpus.catalogue import Gpu
from workbench.measure.timeline import LIVES, TensorTimeline, live_bytes, phases_of
from workbench.prediction.shadow.reductions import Reduction, Splits


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

    nbytes: NDArray[np.int64]
    born: NDArray[np.int64]
    died: NDArray[np.int64]
    category: NDArray[np.int64]
    maker: NDArray[np.int32]
    operations: tuple[str, ...]
    phase_starts: tuple[tuple[int, Phase | None], ...]
    workspaces: tuple[int, ...]
    shared: dict[int, Reduction | Splits] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    uses_bf16: bool = False
    allocator: dict[str, Any] = field(default_factory=dict)
    attention: dict[Any, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def events(self) -> int:
        return len(self.born) + int((self.died >= 0).sum())

    def sizes(self, gpu: Gpu | None) -> NDArray[np.int64]:
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

    def timeline(self, sizes: NDArray[np.int64]) -> TensorTimeline:
        """Live bytes by category after every event, and each tensor's part in them."""
        lives = {name: getattr(self, name) for name in LIVES} | {"nbytes": sizes}
        return TensorTimeline(live_bytes(lives, self.events), self.phases(), lives, self.operations)
