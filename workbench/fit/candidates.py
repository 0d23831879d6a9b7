"""Which sets of changes a program is tried with, the most promising first: estimates that only decide the order."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from workbench.advise.candidate import NUMERICS
from workbench.advise.plan import families
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.fit.places import is_one_switch
from workbench.gpus.catalogue import Gpu
from workbench.techniques import REGISTRY, Capability, Numerics, Technique, technique
from workbench.techniques.base import Arguments, Stage, check_together

MOST_CHANGES = 4
GAPS = "gaps"  # between the tensors that the allocator holds


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
        shares: dict[str, float] = defaultdict(lambda: 1.0)
        for change in changes:
            for category, share in change.leaves.items():
                shares[category] *= share
        activations = self.activations * shares[Category.ACTIVATIONS]
        logits = self.logits * shares[Category.LOGITS_AND_LOSS]
        gradients = self.gradients * shares[Category.GRADIENTS]
        states = self.states * shares[Category.OPTIMIZER_STATES]
        gaps = self.gaps * shares[GAPS]
        # the backward pass begins with no gradients and ends with all; the step has temporaries as large as they are
        work = max(activations + logits, 2 * gradients)
        return self.weights + states + work + gaps + self.context


def offered(seen: Mapping[str, Any], gpu: Gpu) -> list[tuple[Technique, ...]]:
    """Of each technique that this program can be given, the settings to try, the gentlest first."""
    model = seen["model"]
    choices: list[tuple[Technique, ...]] = [(technique("allocator"),)]
    if model["eager"]:
        choices.append((technique("attention", implementation="sdpa"),))
    for name, variants in families(gpu.compute_capability).items():
        is_repeated = Capability.ACCUMULATION in REGISTRY[name].brings  # there can be more of it
        if (name in seen["there"] and not is_repeated) or (name == "fused_gelu" and not model["written_out"]):
            continue
        possible = [variant for variant in variants if variant.leaves and _can_be_given(variant, seen)]
        # where one argument of the Trainer does it, nothing else is written into the script
        possible = [variant for variant in possible if is_one_switch(variant)] or possible
        for numerics in Numerics:  # of each kind of loss another choice
            alike = tuple(variant for variant in possible if variant.numerics is numerics)
            if alike:
                choices.append(alike)
    return choices


def _can_be_given(variant: Technique, seen: Mapping[str, Any]) -> bool:
    """A loop takes from outside what changes its model, and no argument: its optimizer is made already. Of a Trainer
    the batch must suit."""
    is_loop = seen["kind"] == "loop"
    arguments: Arguments = {"per_device_train_batch_size": 1 if is_loop else seen["batch"][0]}
    try:
        decided = variant.training_arguments(arguments)
    except ConfigurationError:
        return False
    return not is_loop or (variant.stage in (Stage.ARCHITECTURE, Stage.WRAP) and decided == arguments)


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
    return sum(change.slower for change in changes)


def _suits(changes: tuple[Technique, ...]) -> bool:
    try:
        check_together(changes, "plan")
    except ConfigurationError:
        return False
    return True
