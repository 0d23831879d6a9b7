"""`Prediction`, and `compute`, which makes it from a trace. Importing this does not import torch."""

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.roofline import flops
from workbench.measure.categories import Phase
from workbench.paths import versions
from workbench.recipe import Recipe

if TYPE_CHECKING:
    from workbench.predict.tensors import TensorTimeline
    from workbench.ranks.shards import Ranks

CPU = "cpu"


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a training step. Bytes are those of the allocator's blocks.

    `by_category` is read at the instant of the peak and sums to `peak_allocated_bytes`; what no tensor accounts for
    (`workspace_bytes` of cuBLAS, kernels' scratch, rounding to blocks) is `unattributed`, as in a measurement.
    Outside the allocator stands `context_bytes`, an estimate. `work` is what one optimizer step asks for, recomputation
    included: `half_flops` in fp16 and bf16, `fp32_flops` in others, `memory_bytes` that all other operations read and
    write, `bus_bytes` that are copied to the host or a disk and back. `gpu="cpu"` predicts what this machine's own
    kernels would take; there is no allocator and no capacity.
    """

    recipe: dict[str, Any]
    recipe_id: str
    label: str
    model: str
    gpu: str
    source: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    by_category: dict[str, int]
    maximum_by_category: dict[str, int]
    by_phase: dict[str, int]
    peak_phase: str
    peak_operation: str
    work: dict[str, int]
    context_bytes: int
    workspace_bytes: int
    capacity_bytes: int | None
    padding: bool
    micro_batch_size: int
    gradient_accumulation_steps: int
    parameters: int
    trainable_parameters: int
    has_experts: bool  # which of them a token goes to depends on values: real peaks differ
    versions: dict[str, str] = field(default_factory=dict)
    ranks: int = 1  # that share the batch; the memory and the work are those of one
    shard: str = ""  # what each of several keeps of the model
    timeline: "TensorTimeline | None" = field(default=None, compare=False, repr=False)

    @property
    def flops(self) -> int:
        return flops(self.work)

    @property
    def fits(self) -> bool:
        """The reserved memory and the context are within what the GPU has."""
        if self.capacity_bytes is None or self.peak_reserved_bytes is None:
            return True
        return self.peak_reserved_bytes + self.context_bytes <= self.capacity_bytes

    def __str__(self) -> str:
        from workbench.predict.report import prediction_text

        return prediction_text(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, without the timeline."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "timeline"}
        return plain | {"fits": self.fits, "flops": self.flops}


def compute(
    recipe: Recipe, gpus: list[str], padding: bool, ranks: "Ranks | None" = None
) -> list[Prediction | WorkbenchError]:
    """Make the predictions. It patches libraries while it runs, so call it in the worker process only."""
    answers: list[Prediction | WorkbenchError] = []
    for name in gpus:
        try:
            answers.append(_compute(recipe, name, padding, ranks))
        except WorkbenchError as error:
            answers.append(error)
    return answers


def _compute(recipe: Recipe, name: str, padding: bool, ranks: "Ranks | None") -> Prediction:
    from workbench.predict.shadow.replay import replay
    from workbench.predict.shadow.traces import trace_for

    gpu = None if name == CPU else find_gpu(name)
    trace = trace_for(recipe, gpu, padding, ranks)
    return prediction_of(recipe, gpu, "predicted", ranks, **replay(trace, gpu), work=trace.work, **trace.facts)


def prediction_of(recipe: Recipe, gpu: Gpu | None, how: str, ranks: "Ranks | None", **fields: Any) -> Prediction:
    """With what a recipe and a GPU say of themselves; the other fields come from an engine."""
    name = gpu.name if gpu else CPU
    return Prediction(
        recipe=recipe.to_dict(),
        recipe_id=recipe.id,
        label=recipe.label,
        model=recipe.model,
        gpu=name,
        source=f"{how}:{name}",
        context_bytes=gpu.context_bytes_estimate if gpu else 0,
        capacity_bytes=gpu.memory_bytes if gpu else None,
        versions=versions(),
        ranks=ranks.count if ranks else 1,
        shard=ranks.shard if ranks else "",
        **{name: _plain(value) for name, value in fields.items()},
    )


def _plain(value: Any) -> Any:
    """Of categories and phases the names."""
    if isinstance(value, dict):
        return {str(key): number for key, number in value.items()}
    return str(value) if isinstance(value, Phase) else value
