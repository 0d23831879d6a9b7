"""The questions that the site's front page takes, those of them that are predicted, and how it answers the rest.

Between two points of the grid the page interpolates along the tokens of a pass. That is nearly right, because attention
without stored probabilities and all else that grows is affine in them, and they count the same in long and in short
sequences. A verdict between two points is that of both, or "close". `docs/front/front.js` does the same.
"""

import hashlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import compress, product
from operator import itemgetter

from workbench.gpus.catalogue import GPUS, MIB, Gpu
from workbench.models.known import PUBLISHED
from workbench.prediction import committed
from workbench.recipe import Recipe
from workbench.techniques import (
    ChunkedCrossEntropy,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    PureBf16,
    Qlora,
    Technique,
)

Points = dict[str, dict[str, list[list[int]]]]  # rows of COLUMNS by model and set, the fewest tokens first

REFERENCE = GPUS["a100-80gb"]
MODELS = {
    "gpt2": "GPT-2 124M",
    "gpt2-medium": "GPT-2 355M",
    "gpt2-large": "GPT-2 774M",
    "gpt2-xl": "GPT-2 XL 1.5B",
    "HuggingFaceTB/SmolLM2-135M": "SmolLM2 135M",
    "Qwen/Qwen3-0.6B": "Qwen3 0.6B",
    "meta-llama/Llama-3.2-1B": "Llama 3.2 1B",
    "Qwen/Qwen3-4B": "Qwen3 4B",
    "meta-llama/Llama-3.1-8B": "Llama 3.1 8B",
}
# A visitor chooses one of these ways to train; on a card without bf16 arithmetic mixed precision is fp16.
MODES: dict[str, tuple[Technique, ...]] = {
    "full": (),
    "mixed": (MixedPrecision(),),
    "bf16": (PureBf16(), Optimizer(kind="adamw_flash")),
    "lora": (Lora(), MixedPrecision()),
    "qlora": (Qlora(), MixedPrecision()),
}
ADAPTERS = ("lora", "qlora")  # gradients are so small here that a micro-batch needs what a batch of its size needs
SWITCHES: dict[str, Technique] = {
    "gelu": FusedGelu(),
    "chunk": ChunkedCrossEntropy(),
    "ckpt": GradientCheckpointing(),
}
ACCUMULATED = "acc"  # a switch too: one sequence at a time
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)
LENGTHS = (256, 384, 512, 768, 1024, 1536, 2048)
GPT2_LENGTH = 1024
POINTS_LENGTH = 1024  # tokens; all points but the first and the last have sequences of this length
SHAPES = ((1, 256), (1, 1024), (4, 1024), (8, 1024), (16, 1024))
LONG_SHAPES = ((1, 256), (1, 1024), (4, 1024), (8, 1024), (16, 2048))
MICRO_BATCHES = 2  # more of them need the same memory
CATEGORIES = ("weights", "gradients", "optimizer_states", "activations", "logits_and_loss", "temporaries")
COLUMNS = ("tokens", "reserved", "allocated", *CATEGORIES)  # all but the first are in MiB
MARGIN_MIB = 64  # allowed for what was not predicted in this very shape for cards of this kind

FITS = "fits"
OVER = "over"
CLOSE = "close"


@dataclass(frozen=True)
class Choice:
    """A visitor's choice on the page, without the card."""

    model: str
    mode: str
    switches: tuple[str, ...]
    batch: int
    length: int

    @property
    def accumulates(self) -> bool:
        return ACCUMULATED in self.switches

    @property
    def tokens(self) -> int:
        """The tokens of one pass through the model."""
        sequences = 1 if self.accumulates else self.batch
        return self.length * sequences

    @property
    def curve(self) -> str:
        """The name of its set among the points of a model."""
        names = [self.mode, *self.switches]
        if self.mode in ADAPTERS and self.accumulates:
            names.remove(ACCUMULATED)
        return "+".join(names)

    def recipe(self, gpu: Gpu = REFERENCE) -> Recipe:
        techniques = list(MODES[self.mode])
        if not gpu.device.computes_bf16:
            techniques = list(map(fp16_instead, techniques))
        for name in self.switches:
            if name == ACCUMULATED:
                techniques.append(GradientAccumulation(steps=self.batch))
            else:
                techniques.append(SWITCHES[name])
        return recipe_of(self.model, techniques, self.batch, self.length)


def recipe_of(model: str, techniques: list[Technique], batch: int, length: int) -> Recipe:
    return Recipe(
        model=f"random:{model}",
        effective_batch_size=batch,
        sequence_length=length,
        techniques=tuple(techniques),
    )


def fp16_instead(technique: Technique) -> Technique:
    return MixedPrecision(dtype="fp16") if isinstance(technique, MixedPrecision) else technique


# ---- the grid ----


def is_gpt2(model: str) -> bool:
    return PUBLISHED[model]["model_type"] == "gpt2"


def modes_of(model: str) -> list[str]:
    """Return the ways to train a model: QLoRA is for large ones alone."""
    return [mode for mode in MODES if mode != "qlora" or not is_gpt2(model)]


def switches_of(model: str) -> list[str]:
    """Return a model's switches. Only GPT-2 has an activation function that is written out in Python, for `gelu`."""
    return [name for name in SWITCHES if name != "gelu" or is_gpt2(model)]


def lengths_of(model: str) -> list[int]:
    return [length for length in LENGTHS if length <= GPT2_LENGTH or not is_gpt2(model)]


def suits(model: str, mode: str, length: int, gpu: Gpu) -> bool:
    """Whether the points say something of this: PyTorch has fused kernels for grouped queries in 16 bits and from
    Ampere on alone. Elsewhere attention stores its probabilities, which grow with the square of the length, so the
    tokens of a pass do not tell what it needs, and nothing else is answered than the length of the points."""
    if mode == "bf16" and not gpu.device.computes_bf16:
        return False
    if is_gpt2(model) or (mode != "full" and gpu.compute_capability >= (8, 0)):
        return True
    return mode == "full" and length == POINTS_LENGTH


def sets_of(model: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every way to train with every combination of switches, but without accumulation."""
    names = switches_of(model)
    for mode in modes_of(model):
        for is_on in product((False, True), repeat=len(names)):
            yield mode, tuple(compress(names, is_on))


def grid() -> Iterator[Choice]:
    for model in MODELS:
        shapes = SHAPES if is_gpt2(model) else LONG_SHAPES
        lengths = sorted({length for _, length in shapes})
        for mode, switches in sets_of(model):
            for batch, length in shapes:
                yield Choice(model, mode, switches, batch, length)
            if mode not in ADAPTERS:
                for length in lengths:
                    yield Choice(model, mode, (ACCUMULATED, *switches), MICRO_BATCHES, length)


def key_of_grid() -> str:
    """Return a digest that changes with any recipe of the grid, the libraries' releases and `committed.GENERATION`."""
    digest = hashlib.sha256()
    for choice in grid():
        digest.update(committed.key(choice.recipe(), REFERENCE.name).encode())
    return digest.hexdigest()[:16]


# ---- what the page answers: front.js does the same ----


@dataclass(frozen=True)
class Answer:
    """The page's answer in MiB, with CUDA's context: `need` with what the allocator keeps, `tensors` without."""

    need: float
    tensors: float
    verdict: str


def extra_mib(gpu: Gpu) -> float:
    """Return what a card takes beside the points: CUDA's context, and by how much cuBLAS's two workspaces differ."""
    workspaces = 2 * (gpu.cublas_workspace_bytes - REFERENCE.cublas_workspace_bytes)
    return (gpu.context_bytes_estimate + workspaces) / MIB


def answer(points: Points, choice: Choice, gpu: Gpu) -> Answer:
    """Answer from the point with as many tokens, or from the one before and the one after."""
    rows = points[choice.model][choice.curve]
    index = bisect_left(rows, choice.tokens, key=itemgetter(0))
    after = rows[index]
    before = after
    part = 0.0
    if after[0] > choice.tokens:
        before = rows[index - 1]
        part = (choice.tokens - before[0]) / (after[0] - before[0])
    is_of_this_kind = gpu.cublas_workspace_bytes == REFERENCE.cublas_workspace_bytes
    margin = 0 if is_of_this_kind and is_predicted(choice) else MARGIN_MIB
    first_verdict = verdict(before[1], before[2], gpu, margin)
    last_verdict = verdict(after[1], after[2], gpu, margin)
    return Answer(
        need=between(before[1], after[1], part) + extra_mib(gpu),
        tensors=between(before[2], after[2], part) + extra_mib(gpu),
        verdict=first_verdict if first_verdict == last_verdict else CLOSE,
    )


def between(before: int, after: int, part: float) -> float:
    return before + part * (after - before)


def verdict(reserved: float, allocated: float, gpu: Gpu, margin: float) -> str:
    """Judge a choice on a card by its MiB, with and without what the allocator would keep.

    It fits if all of that fits, and is over if the tensors alone do not. Between the two PyTorch gives back what it
    keeps, which may or may not be enough.
    """
    room = gpu.memory_bytes / MIB - extra_mib(gpu)
    if reserved + margin <= room:
        return FITS
    if allocated - margin > room:
        return OVER
    return CLOSE


@cache
def choices_of_grid() -> frozenset[Choice]:
    return frozenset(grid())


def is_predicted(choice: Choice) -> bool:
    return choice in choices_of_grid()
