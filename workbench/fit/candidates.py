"""The sets of changes that a program is tried with, the most promising first.

Estimates decide which sets are tried, and in which order. Whatever is said of a set comes from a run of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product

from workbench.advise.candidate import worst_numerics
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.fit.any_training import Facts
from workbench.fit.places import Techniques, arguments_of, detect_names, is_one_switch, places_of, settings_to_try
from workbench.gpus.catalogue import Gpu
from workbench.measure.out_of_memory import numbers_in
from workbench.techniques import REGISTRY, Capability, Numerics, Technique
from workbench.techniques.base import Stage, check_together

MOST_CHANGES = 4  # the most techniques in one set: of larger sets there would be too many to estimate
MOMENTS = 2  # AdamW keeps two numbers for each number that is trained
GAPS = "gaps"  # reserved memory that no tensor takes
CONTEXT = "context"  # CUDA's own
# bytes by category of memory, beside them those of GAPS and CONTEXT
Sizes = Mapping[str, float]


def sizes_of(facts: Facts, reserved_bytes: int, context_bytes: int) -> Sizes:
    """Estimate the parts of a program's memory from a run of it.

    If that run ended out of memory, the parts are lower bounds.
    """
    sizes = facts["sizes"]
    states = sizes["states"]
    beside = max(sizes["peak"] - sizes["weights"] - states, 0)
    if facts.get("ended_by") == "out of memory":
        beside += _read_requested_bytes(facts["message"])
        states = states or MOMENTS * sizes["trained"]
    numbers = facts["rows"] * facts["tokens"] * facts.get("vocabulary", 0)  # B·T·V
    logits = min(3 * 4 * numbers, beside)  # logits, their logarithms and their gradient, 4 bytes a number
    return {
        Category.WEIGHTS: sizes["weights"],
        Category.GRADIENTS: sizes["trained"],
        Category.OPTIMIZER_STATES: states,
        Category.LOGITS_AND_LOSS: logits,
        Category.ACTIVATIONS: beside - logits,
        GAPS: max(reserved_bytes - sizes["peak"], 0),
        CONTEXT: context_bytes,
    }


def _read_requested_bytes(message: str) -> int:
    """Read from an out-of-memory message how many bytes were asked for; 0 if it does not say it."""
    with suppress(ConfigurationError):
        return numbers_in(message)["requested_bytes"] or 0
    return 0


def estimate(sizes: Sizes, changes: Sequence[Technique]) -> float:
    """Estimate the bytes that a program would need with these techniques."""
    left = dict(sizes)
    for change in changes:
        for category, share in change.remaining_shares.items():
            left[category] *= share
    # The backward pass begins with no gradients and ends with all; the step has temporaries as large as they are.
    work = max(left[Category.ACTIVATIONS] + left[Category.LOGITS_AND_LOSS], 2 * left[Category.GRADIENTS])
    return work + sum(left[name] for name in (Category.WEIGHTS, Category.OPTIMIZER_STATES, GAPS, CONTEXT))


def list_choices(facts: Facts, gpu: Gpu, *, by_arguments_alone: bool = False) -> list[Techniques]:
    """List the techniques that a program can take, each in the settings to try.

    There is a tuple for each technique and kind of loss, with the gentlest settings first.

    Args:
        by_arguments_alone: the program's interpreter has no workbench, whose functions could be called.
    """
    choices: list[Techniques] = []
    present = detect_names(facts)
    for name, technique in sorted(REGISTRY.items()):
        can_be_raised = Capability.ACCUMULATION in technique.brings  # a program that has it can have more of it
        if (name in present and not can_be_raised) or is_left_to_the_program(technique, facts):
            continue
        variants = settings_to_offer(technique, gpu)
        possible = [entry for entry in variants if _can_be_given(entry, facts, by_arguments_alone)]
        # If one argument of the Trainer does the technique's work, the script gets that argument and nothing else.
        possible = list(filter(is_one_switch, possible)) or possible
        for numerics in Numerics:
            alike = tuple(variant for variant in possible if variant.numerics is numerics)
            if alike:
                choices.append(alike)
    return choices


def settings_to_offer(technique: type[Technique], gpu: Gpu) -> list[Technique]:
    """List the settings of a technique with which it saves memory on a GPU."""
    variants = settings_to_try(technique)
    if technique.attacks:
        variants = technique.variants(gpu.compute_capability)
    return [variant for variant in variants if variant.remaining_shares]


def is_left_to_the_program(technique: type[Technique], facts: Facts) -> bool:
    """Whether a technique decides about the optimizer, while the program's Trainer takes one that the program made."""
    return bool(facts.get("own_optimizer")) and technique.stage in (Stage.OPTIMIZE, Stage.STEP)


def _can_be_given(variant: Technique, facts: Facts, by_arguments_alone: bool) -> bool:
    """Whether a program can take a technique from outside.

    A loop takes what changes its model, and no argument: its optimizer is made already. A Trainer whose model is of
    another kind takes arguments alone, and none that change its batch: its loss may be no mean over rows.
    """
    try:
        places = places_of([variant], arguments_of(facts))
    except ConfigurationError:
        return False
    has_function = bool(places.on_model or places.on_trainer)
    if by_arguments_alone and has_function:
        return False
    if facts["kind"] == "loop":
        changes_model = has_function and variant.stage in (Stage.ARCHITECTURE, Stage.WRAP)
        return changes_model or bool(places.environment)
    return "model" in facts or (variant.stage is not Stage.BATCHES and not has_function)


def sets_of(choices: list[Techniques], numerics: Numerics, sizes: Sizes, room_bytes: float) -> Iterator[Techniques]:
    """Yield the sets of changes whose loss is of this kind and whose estimate is within the room: small sets first,
    then fast ones, and of the same techniques the gentlest settings first."""
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


def extra_time(changes: Techniques) -> float:
    """Estimate how much longer a step takes with these changes, as a share of its time."""
    return sum(change.slower for change in changes)
