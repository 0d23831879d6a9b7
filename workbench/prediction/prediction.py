"""`Prediction`: its fields, and how it is shown. Importing this does not import torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.base.categories import format_bytes
from workbench.base.device import CPU
from workbench.base.errors import WorkbenchError
from workbench.base.operations import operation_in_words
from workbench.base.paths import versions
from workbench.base.result import Result
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.roofline import flops
from workbench.recipe import Recipe

if TYPE_CHECKING:
    from workbench.measure.timeline import TensorTimeline
    from workbench.training.ranks.shards import Ranks


BAR_WIDTH = 40  # characters
ROUTING = "a mixture of experts: which of them a token goes to depends on values, so real peaks differ"
MESSAGES = "what NCCL takes for its messages comes beside this, outside of PyTorch's allocator"


@dataclass(frozen=True)
class Prediction(Result):
    """The predicted memory of a training step. Bytes are those of the allocator's blocks.

    `by_category` is read at the instant of the peak and sums to `peak_allocated_bytes`; what no tensor accounts for
    (`workspace_bytes` of cuBLAS, kernels' scratch, rounding to blocks) is `unattributed`, as in a measurement.
    Outside the allocator stands `context_bytes`, an estimate. `work` is what one optimizer step asks for, recomputation
    included: `half_flops` in fp16 and bf16, `fp32_flops` in others, `memory_bytes` that all other operations read and
    write, `bus_bytes` that are copied to the host or a disk and back. `gpu="cpu"` predicts what this machine's own
    kernels would take; there is no allocator and no capacity.
    """

    recipe_settings: dict[str, Any]  # the recipe as JSON, whose key is `recipe`
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
    has_experts: bool  # a mixture of experts: values decide where a token goes, so that real peaks differ
    versions: dict[str, str] = field(default_factory=dict)
    ranks: int = 1  # how many share the batch; memory and work are those of one of them
    shard: str = ""  # the part of the model that each of several ranks keeps
    timeline: "TensorTimeline | None" = field(default=None, compare=False, repr=False)

    @property
    def recipe(self) -> Recipe:
        """The recipe that was predicted. Raises ConfigurationError: it has a technique that is not known here."""
        return Recipe.from_dict(self.recipe_settings)

    @property
    def flops(self) -> int:
        """The floating-point operations of one optimizer step, recomputation included."""
        return flops(self.work)

    @property
    def need_bytes(self) -> int:
        """The memory that the device must have: what the allocator reserves, and CUDA's context.

        A CPU reserves nothing, so that what is allocated counts.

        Cached memory that PyTorch would give back near the limit counts, so the answer errs on the safe side.
        """
        return (self.peak_reserved_bytes or self.peak_allocated_bytes) + self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether the GPU has as much memory as is needed. A CPU has no limit."""
        return self.capacity_bytes is None or self.need_bytes <= self.capacity_bytes

    def __str__(self) -> str:
        """Show peak, categories and phases, with bars."""
        headline = (
            f"{self.label} on {self.model}, "
            f"{self.micro_batch_size} × {self.recipe_settings['sequence_length']} tokens at a time"
        )
        if self.padding:
            headline += " with padding"
        if self.shard:
            headline += f", on each of {self.ranks:,} ranks (shard {self.shard})"
        gpu = "this machine's kernels"
        if self.gpu in GPUS:
            gpu = GPUS[self.gpu].title
        peak = f"{format_bytes(self.peak_allocated_bytes)} allocated"
        fit = "no limit known"
        if self.peak_reserved_bytes is not None:
            reserved = f"{format_bytes(self.peak_reserved_bytes)} reserved"
            peak += f", {reserved}"
            fit = (
                f"{'yes' if self.fits else 'NO'}: needs {format_bytes(self.need_bytes)} of "
                f"{format_bytes(self.capacity_bytes or 0)} ({reserved}, "
                f"about {format_bytes(self.context_bytes)} of CUDA context)"
            )
        lines = [
            f"{headline}: predicted for {gpu} by {engine_words(self.source)}, not measured",
            f"  peak   {peak}, in the {self.peak_phase.replace('_', ' ')}",
            f"         at {operation_in_words(self.peak_operation)} ({self.peak_operation})",
            f"  fits   {fit}",
            f"  work   {self.flops / 1e12:,.2f} × 10¹² floating-point operations per step, recomputation included",
            "",
            f"  {'':18}{'at the peak':>12}{'at most':>12}",
        ]
        for category, size in self.by_category.items():
            lines.append(self._line(category, size, format_bytes(self.maximum_by_category[category])))
        if self.has_experts:
            lines.append(f"  note   {ROUTING}")
        if self.ranks > 1:
            lines.append(f"  note   {MESSAGES}")
        lines += ["", f"  {'':18}{'peak':>12}"]
        for phase, size in self.by_phase.items():
            lines.append(self._line(phase, size))
        return "\n".join(lines)

    def _line(self, name: str, size: int, most: str = "") -> str:
        bar = "█" * round(BAR_WIDTH * size / self.peak_allocated_bytes)
        return f"  {name.replace('_', ' '):18}{format_bytes(size):>12}{most:>12}  {bar}".rstrip()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary, without the timeline."""
        plain = {"recipe": self.recipe_settings, **vars(self), "fits": self.fits, "flops": self.flops}
        del plain["recipe_settings"], plain["timeline"]
        return plain


# A device that cannot run the recipe has the error in the place of its prediction.
PredictionOrError = Prediction | WorkbenchError


def make_prediction(
    recipe: Recipe,
    gpu: Gpu | None,
    how: str,
    ranks: "Ranks | None",
    **fields: Any,
) -> Prediction:
    """Make a prediction of the fields that an engine found, and of those that recipe, GPU and ranks decide.

    Args:
        gpu: the card; None is this machine's CPU.
        how: the first part of `source`, `predicted` or `emulated`.
        ranks: the ranks that share the batch; None is a process alone.
        fields: all other fields.
    """
    if gpu:
        fields |= {"gpu": gpu.name, "capacity_bytes": gpu.memory_bytes, "context_bytes": gpu.context_bytes_estimate}
    else:
        fields |= {"gpu": CPU, "capacity_bytes": None, "context_bytes": 0}
    if ranks:
        fields |= {"ranks": ranks.count, "shard": ranks.shard}
    return Prediction(
        recipe_settings=recipe.to_dict(),
        recipe_id=recipe.id,
        label=recipe.label,
        model=recipe.model,
        source=f"{how}:{fields['gpu']}",
        versions=versions(),
        **fields,
    )


# ---- predictions as text ----


def engine_words(source: str) -> str:
    """Return the name of the engine that made a prediction with this `source`, for tables and captions."""
    if source.startswith("emulated"):
        return "PyTorch's allocator on an emulated GPU"
    return "the shadow of its step"


def list_fitting(answers: dict[str, PredictionOrError]) -> str:
    """Return lines that name the GPUs on which a recipe fits, with what it needs there, and then the others with why it
    does not.

    Args:
        answers: the prediction or the error of each GPU, by its name.
    """
    fits = []
    too_small = []
    cannot = []
    for gpu, answer in answers.items():
        if isinstance(answer, WorkbenchError):
            cannot.append(f"  cannot run on    {gpu}: {answer}")
        elif answer.fits:
            capacity = format_bytes(answer.capacity_bytes or 0)
            fits.append(f"    {gpu:14}{format_bytes(answer.need_bytes):>12}{capacity:>12}")
        else:
            too_small.append(gpu)
    lines = ["  fits on          none of the known GPUs"]
    if fits:
        lines = [f"  {'fits on':16}{'needs':>12}{'has':>12}  (CUDA's context is counted)", *fits]
    if too_small:
        lines.append(f"  does not fit on  {', '.join(too_small)}")
    return "\n".join([*lines, *cannot])
