"""Which sets of changes a program is tried with, the most promising first: estimates that only decide the order."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import Any

from workbench.advise.candidate import worst_numerics
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.fit.places import arguments_of, is_one_switch, names_there, places_of, settings_to_try
from workbench.gpus.catalogue import Gpu
from workbench.measure.out_of_memory import numbers_in
from workbench.techniques import REGISTRY, Capability, Numerics, Technique
from workbench.techniques.base import Stage, check_together

MOST_CHANGES = 4
MOMENTS = 2  # of AdamW, for each number that is trained
GAPS = "gaps"  # between the tensors that the allocator holds
CONTEXT = "context"
# bytes of the categories of memory, of gaps and of CUDA's context, with room enough
Sizes = Mapping[str, float]


def sizes_of(seen: Mapping[str, Any], reserved_bytes: int, context_bytes: int) -> Sizes:
    """What a program's memory consists of, from a run of it with room enough; or of one that had none: the least."""
    sizes = seen["sizes"]
    states = sizes["states"]
    beside = max(sizes["peak"] - sizes["weights"] - states, 0)
    if seen.get("ended_by") == "out of memory":
        beside += _requested_bytes(seen["message"])
        states = states or MOMENTS * sizes["trained"]
    numbers = seen["rows"] * seen["tokens"] * seen.get("vocabulary", 0)
    logits = min(3 * 4 * numbers, beside)  # themselves, their logarithms, their gradient
    return {
        Category.WEIGHTS: sizes["weights"],
        Category.GRADIENTS: sizes["trained"],
        Category.OPTIMIZER_STATES: states,
        Category.LOGITS_AND_LOSS: logits,
        Category.ACTIVATIONS: beside - logits,
        GAPS: max(reserved_bytes - sizes["peak"], 0),
        CONTEXT: context_bytes,
    }


def _requested_bytes(message: str) -> int:
    """What was asked for when there was no more; 0 where the message does not say it."""
    with suppress(ConfigurationError):
        return numbers_in(message)["requested_bytes"] or 0
    return 0


def estimate(sizes: Sizes, changes: Sequence[Technique]) -> float:
    """About what it would need with these techniques."""
    left = dict(sizes)
    for change in changes:
        for category, share in change.leaves.items():
            left[category] *= share
    # the backward pass begins with no gradients and ends with all; the step has temporaries as large as they are
    work = max(left[Category.ACTIVATIONS] + left[Category.LOGITS_AND_LOSS], 2 * left[Category.GRADIENTS])
    return work + sum(left[name] for name in (Category.WEIGHTS, Category.OPTIMIZER_STATES, GAPS, CONTEXT))


def offered(seen: Mapping[str, Any], gpu: Gpu, *, by_arguments_alone: bool = False) -> list[tuple[Technique, ...]]:
    """Of each technique that this program can be given, the settings to try, the gentlest first.

    Args:
        by_arguments_alone: there is no workbench in its interpreter, whose functions could be called.
    """
    choices: list[tuple[Technique, ...]] = []
    there = names_there(seen)
    for name, technique in sorted(REGISTRY.items()):
        is_repeated = Capability.ACCUMULATION in technique.brings  # there can be more of it
        if (name in there and not is_repeated) or is_left_to_the_program(technique, seen):
            continue
        variants = settings_to_offer(technique, gpu)
        possible = [entry for entry in variants if _can_be_given(entry, seen, by_arguments_alone)]
        # where one argument of the Trainer does it, nothing else is written into the script
        possible = list(filter(is_one_switch, possible)) or possible
        for numerics in Numerics:  # of each kind of loss another choice
            alike = tuple(variant for variant in possible if variant.numerics is numerics)
            if alike:
                choices.append(alike)
    return choices


def settings_to_offer(technique: type[Technique], gpu: Gpu) -> list[Technique]:
    """Those with which it saves something on such a card."""
    variants = settings_to_try(technique)
    if technique.attacks:
        variants = technique.variants(gpu.compute_capability)
    return [variant for variant in variants if variant.leaves]


def is_left_to_the_program(technique: type[Technique], seen: Mapping[str, Any]) -> bool:
    """It decides about the optimizer, and the program's Trainer takes one that the program made."""
    return bool(seen.get("own_optimizer")) and technique.stage in (Stage.OPTIMIZE, Stage.STEP)


def _can_be_given(variant: Technique, seen: Mapping[str, Any], by_arguments_alone: bool) -> bool:
    """A loop takes from outside what changes its model, and no argument: its optimizer is made already. A Trainer with
    a model of another kind takes arguments, and the batch that it has: its loss may be none of single rows."""
    try:
        places = places_of([variant], arguments_of(seen))
    except ConfigurationError:
        return False
    has_function = bool(places.on_model or places.on_trainer)
    if by_arguments_alone and has_function:
        return False
    if seen["kind"] == "loop":
        changes_model = has_function and variant.stage in (Stage.ARCHITECTURE, Stage.WRAP)
        return changes_model or bool(places.environment)
    return "model" in seen or (variant.stage is not Stage.BATCHES and not has_function)


def sets_of(
    choices: list[tuple[Technique, ...]], numerics: Numerics, sizes: Sizes, room_bytes: float
) -> Iterator[tuple[Technique, ...]]:
    """Sets whose loss is of this kind and that may fit by their estimates: the small ones first, then the fast ones,
    and of the same techniques those with the gentlest settings."""
    for count in range(1, MOST_CHANGES + 1):
        hopeful = []
        for chosen in combinations(choices, count):
            for changes in product(*chosen):
                if worst_numerics(changes) is numerics and estimate(sizes, changes) <= room_bytes:
                    hopeful.append(changes)
        for changes in sorted(hopeful, key=extra_time):
            try:
                check_together(changes, "plan")
            except ConfigurationError:
                continue
            yield changes


def extra_time(changes: tuple[Technique, ...]) -> float:
    """About how much longer a step takes, as a share: for the order alone."""
    return sum(change.slower for change in changes)
