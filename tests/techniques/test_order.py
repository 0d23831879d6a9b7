"""The order in which techniques act is declared, as stages; no name decides anything."""

from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import ClassVar

import pytest
from transformers import GPT2Config

from workbench.base.errors import ConfigurationError
from workbench.models.family import family_of
from workbench.recipe import Recipe
from workbench.techniques import (
    REGISTRY,
    ChunkedCrossEntropy,
    DataLoading,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    Padding,
    PromptTuning,
    SequenceLength,
)
from workbench.techniques.base import Capability, Stage, Technique
from workbench.training.run import run

GPT2 = family_of(GPT2Config())

SEAMS = ("examples", "dataset", "collator", "model", "trainer")
ALONE = {cls.name: (SequenceLength(tokens=64) if cls is SequenceLength else cls()) for cls in REGISTRY.values()}


def renamed(technique, name):
    return technique.replacing(name=name)


def calls(technique, seam):
    return technique.model(GPT2) if seam == "model" else getattr(technique, seam)()


def acting(recipe):
    """What is done in each seam, in the order of the stages; those of one stage act on different things (see below)."""
    functions = {}
    for seam in SEAMS:
        calls_of_seam = [(technique.stage, calls(technique, seam)) for technique in recipe.techniques]
        staged = [(stage, call.function) for stage, call in calls_of_seam if call]
        staged.sort(key=lambda pair: (pair[0], pair[1].__name__))
        functions[seam] = [function for _, function in staged]
    return functions


def together():
    for one, other in combinations(ALONE.values(), 2):
        try:
            yield Recipe(techniques=(one, other))
        except ConfigurationError:
            continue


PAIRS = list(together())


def test_there_are_pairs_to_look_at():
    assert len(PAIRS) > 150


def test_renaming_changes_nothing_about_what_a_pair_does():
    for recipe, names in product(PAIRS, (("a_first", "z_last"), ("z_last", "a_first"))):
        other = Recipe(techniques=tuple(map(renamed, recipe.techniques, names)))
        assert acting(other) == acting(recipe), recipe.label
        assert other.training_arguments() == recipe.training_arguments(), recipe.label
        assert other.shape == recipe.shape, recipe.label
        assert other.model_arguments(GPT2).keys() == recipe.model_arguments(GPT2).keys(), recipe.label


def test_techniques_of_one_stage_never_meet_in_a_seam():
    """Else their names would decide who comes first."""
    for recipe in PAIRS:
        one, other = recipe.techniques
        if one.stage == other.stage:
            for seam in SEAMS:
                both = [call.function for call in (calls(one, seam), calls(other, seam)) if call is not None]
                assert len(both) < 2 or TRAINER_PARTS.get(both[0].__name__) != TRAINER_PARTS.get(both[1].__name__)
            names = [Recipe(techniques=(alone,)).model_arguments(GPT2).keys() for alone in (one, other)]
            assert not names[0] & names[1]


TRAINER_PARTS = {"chunk_loss": "the loss", "offload_activations": "the context of the forward pass"}


def test_a_run_under_other_names_is_the_same_to_the_last_bit(recipe, fine_tuned):
    chosen = (Lora(), GradientCheckpointing(), ChunkedCrossEntropy(), GradientAccumulation(steps=2), SequenceLength(16))
    short = replace(recipe, steps=2)
    plain = fine_tuned(replace(short, techniques=chosen))
    names = ("zz", "aa", "m", "z", "b")
    other = run(replace(short, techniques=tuple(map(renamed, chosen, names))), device="cpu")
    assert other.losses == plain.losses
    assert other.held_out_loss == plain.held_out_loss
    assert other.by_category == plain.by_category


def test_blocks_are_cut_before_they_are_mapped():
    recipe = Recipe() | DataLoading() | SequenceLength(tokens=64)
    assert [f.__name__ for f in acting(recipe)["dataset"]] == ["cut_rows", "map_from_disk"]


def test_no_collator_is_dropped_by_one_that_replaces_it():
    recipe = Recipe() | PromptTuning() | Padding()
    assert [f.__name__ for f in acting(recipe)["collator"]] == ["pad", "hide_first_label"]


@dataclass(frozen=True)
class InBackward(Technique):
    """An optimizer that steps inside the backward pass: there is no sum of gradients to wait for."""

    name: ClassVar[str] = "optimizer_in_backward"
    stage: ClassVar[Stage] = Stage.OPTIMIZE
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.ACCUMULATION})


def test_accumulation_is_forbidden_by_a_capability_not_by_the_alphabet(subtests):
    for name in ("optimizer_in_backward", "backward_optimizer", "a", "z"):
        words = f"brings gradients summed over several micro-batches, which {name} f"
        with subtests.test(name), pytest.raises(ConfigurationError, match=words):
            Recipe() | GradientAccumulation() | renamed(InBackward(), name)


def test_the_order_of_acting_is_replace_quantize_adapt_wrap():
    order = [Stage.ARCHITECTURE, Stage.QUANTIZE, Stage.ADAPT, Stage.WRAP, Stage.OPTIMIZE]
    assert sorted(order) == order
