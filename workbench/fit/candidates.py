"""Which sets of changes a program is tried with, the most promising first: estimates that only decide the order."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from workbench.advise.candidate import NUMERICS
from workbench.advise.plan import families
from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import Gpu
from workbench.techniques import Numerics, Technique, technique
from workbench.techniques.base import check_together

MOST_CHANGES = 4


@dataclass(frozen=True)
class Effect:
    """About what a technique leaves of each kind of memory, as a share, and how much longer a step takes.

    Of GPT-2 124M at full length on one card, as the lessons have it. Nothing that is printed is made of these numbers.
    """

    activations: float = 1.0
    logits: float = 1.0
    gradients: float = 1.0
    states: float = 1.0
    gaps: float = 1.0
    time: float = 0.0


EFFECTS = {
    "activation_offloading": Effect(activations=0.1, time=0.6),
    "allocator": Effect(gaps=0.3, time=0.01),
    "attention": Effect(activations=0.6, time=-0.1),
    "chunked_cross_entropy": Effect(logits=0.04, time=0.08),
    "fused_gelu": Effect(activations=0.8, time=-0.03),
    "gradient_checkpointing": Effect(activations=0.12, time=0.33),
    "lora": Effect(gradients=0.02, states=0.02, time=-0.2),
    "mixed_precision": Effect(activations=0.65, time=-0.3),
    "optimizer_offloading": Effect(states=0.02, time=0.5),
    "optimizer=adafactor": Effect(states=0.02),
    "optimizer=adamw_8bit": Effect(states=0.26),
    "step_in_backward": Effect(gradients=0.2, time=0.05),
}
# What a loop takes from outside, without its own lines being changed; its optimizer is made already.
OF_A_LOOP = ("activation_offloading", "chunked_cross_entropy", "fused_gelu", "gradient_checkpointing")
OF_A_TRAINER = (
    *OF_A_LOOP,
    "gradient_accumulation",
    "lora",
    "mixed_precision",
    "optimizer",
    "optimizer_offloading",
    "step_in_backward",
)


def effect_of(change: Technique) -> Effect:
    if change.name == "gradient_accumulation":
        share = 1 / change.settings()["steps"]
        return Effect(activations=share, logits=share, time=0.02)
    return EFFECTS.get(change.name) or EFFECTS[f"{change.name}={change.settings()['kind']}"]


@dataclass(frozen=True)
class Sizes:
    """What a program's memory consists of, in bytes, from a run of it with room enough."""

    weights: int
    gradients: int
    states: int
    logits: int
    activations: int
    gaps: int
    context: int

    @classmethod
    def of(cls, seen: Mapping[str, Any], reserved_bytes: int, context_bytes: int) -> "Sizes":
        sizes = seen["sizes"]
        logits = 3 * seen["logits_bytes"]  # themselves, their logarithms, their gradient
        beside = max(sizes["peak"] - sizes["weights"] - sizes["states"], 0)
        logits = min(logits, beside)
        return cls(
            weights=sizes["weights"],
            gradients=sizes["trained"],
            states=sizes["states"],
            logits=logits,
            activations=beside - logits,
            gaps=max(reserved_bytes - sizes["peak"], 0),
            context=context_bytes,
        )

    def estimate(self, changes: tuple[Technique, ...]) -> float:
        """About what it would need with these techniques."""
        activations: float = self.activations
        logits: float = self.logits
        gradients: float = self.gradients
        states: float = self.states
        gaps: float = self.gaps
        for change in changes:
            effect = effect_of(change)
            activations *= effect.activations
            logits *= effect.logits
            gradients *= effect.gradients
            states *= effect.states
            gaps *= effect.gaps
        # the backward pass begins with no gradients and ends with all; the step has temporaries as large as they are
        work = max(activations + logits, 2 * gradients)
        return self.weights + states + work + gaps + self.context


def offered(seen: Mapping[str, Any], gpu: Gpu) -> list[tuple[Technique, ...]]:
    """Of each technique that this program can be given, the settings to try, the gentlest first."""
    names = OF_A_LOOP if seen["kind"] == "loop" else OF_A_TRAINER
    model = seen["model"]
    choices: list[tuple[Technique, ...]] = [(technique("allocator"),)]
    if model["eager"]:
        choices.append((technique("attention", implementation="sdpa"),))
    for name, variants in families(gpu.compute_capability, names).items():
        is_there = name in seen["there"] and name != "gradient_accumulation"  # of which there can be more
        if is_there or (name == "fused_gelu" and not model["written_out"]):
            continue
        if name == "optimizer":  # of each kind of loss another one
            choices += [(variant,) for variant in variants]
            continue
        if name == "gradient_accumulation":
            batch = seen["batch"][0]
            variants = tuple(entry for entry in variants if batch % entry.settings()["steps"] == 0)
        if name == "gradient_checkpointing":
            variants = variants[-1:]  # every block, which is an argument of every version
        if variants:
            choices.append(variants)
    return choices


def sets_of(
    choices: list[tuple[Technique, ...]], numerics: Numerics, sizes: Sizes, room_bytes: float
) -> Iterator[tuple[Technique, ...]]:
    """Sets whose loss is of this kind and that may fit by their estimates: the small ones first, then the fast ones.

    Of each technique's settings the gentlest that may fit beside the others.
    """
    allowed = NUMERICS[: NUMERICS.index(numerics) + 1]
    for count in range(1, MOST_CHANGES + 1):
        hopeful = []
        for chosen in combinations(choices, count):
            for changes in product(*chosen):
                kinds = {change.numerics for change in changes}
                if numerics in kinds and kinds <= set(allowed) and sizes.estimate(changes) <= room_bytes:
                    hopeful.append(changes)
                    break
        hopeful.sort(key=extra_time)
        yield from filter(_suits, hopeful)


def extra_time(changes: tuple[Technique, ...]) -> float:
    """About how much longer a step takes, as a share: for the order alone."""
    return sum(effect_of(change).time for change in changes)


def _suits(changes: tuple[Technique, ...]) -> bool:
    try:
        check_together(changes, "plan")
    except ConfigurationError:
        return False
    return True
