"""Made-up predictions for the parts of the panel: one that is always the same, and one whose bytes follow from batch,
length and techniques alone."""

from dataclasses import dataclass, field

from workbench.base.categories import Category
from workbench.gpus.catalogue import GPUS

MIB = 2**20


class Forecast:
    """What the gauge reads of a prediction."""

    def __init__(self, peak=3 * 2**30, capacity=4 * 2**30, source="emulated:t4"):
        self.gpu, self.context_bytes, self.capacity_bytes = "t4", 2**29, capacity
        self.peak_allocated_bytes = self.peak_reserved_bytes = peak
        self.by_category = {str(c): 0 for c in Category} | {"weights": peak - 100, "activations": 100}
        self.source, self.timeline, self.work = source, None, {"fp32_flops": 1000}
        self.peak_phase, self.peak_operation = "backward", "aten.<b>mm</b>"

    @property
    def need_bytes(self):
        return self.peak_reserved_bytes + self.context_bytes


@dataclass(frozen=True)
class MadeUp:
    """What is read of a prediction."""

    by_category: dict
    gpu: str = "t4"
    source: str = "made up"
    micro_batch_size: int = 8
    flops: int = 1000
    context_bytes: int = 0
    unused_bytes: int | None = None
    capacity_bytes: int | None = None
    work: dict = field(default_factory=lambda: {"fp32_flops": 1000})

    @property
    def peak_allocated_bytes(self):
        return sum(self.by_category.values())

    @property
    def peak_reserved_bytes(self):
        return None if self.unused_bytes is None else self.peak_allocated_bytes + self.unused_bytes

    @property
    def need_bytes(self):
        return (self.peak_reserved_bytes or self.peak_allocated_bytes) + self.context_bytes

    @property
    def fits(self):
        return self.need_bytes <= self.capacity_bytes


class Machine:
    """100 MiB of weights and 1 MiB of activations for 8 tokens at once, a tenth of them with checkpointing; on a GPU
    28 MiB reserved beside, and 72 MiB of context. `answer` may raise, or wait."""

    def __init__(self, answer=lambda recipe: None):
        self.asked, self.answer = [], answer

    def __call__(self, recipe, gpu):
        self.asked.append(recipe)
        self.answer(recipe)
        arguments, names = recipe.training_arguments(), {technique.name for technique in recipe.techniques}
        tokens = arguments["per_device_train_batch_size"] * recipe.sequence_length
        activations = tokens * MIB // (80 if "gradient_checkpointing" in names else 8)
        beside = {} if gpu == "cpu" else {"context_bytes": 72 * MIB, "unused_bytes": 28 * MIB}
        capacity = GPUS[gpu].memory_bytes if gpu in GPUS else None
        return MadeUp({"weights": 100 * MIB, "activations": activations}, gpu, **beside, capacity_bytes=capacity)

    def each(self, recipe, gpus, engine):
        return [self(recipe, gpu) for gpu in gpus]


def words_of(part):
    """What the page says."""
    return part.page.value
