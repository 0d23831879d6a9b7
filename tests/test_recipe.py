import dataclasses
import json
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.techniques import GradientAccumulation, GradientCheckpointing, Lora, MixedPrecision
from workbench.techniques.base import Capability, Technique

ALL = (GradientAccumulation(steps=2), GradientCheckpointing(), Lora(rank=4), MixedPrecision())


@dataclass(frozen=True)
class Prefix(Technique):
    name: ClassVar[str] = "prefix"
    brings: ClassVar[frozenset[Capability]] = frozenset({Capability.KEY_VALUE_CACHE})


def test_a_recipe_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().steps = 3


def test_equal_recipes_are_one_key():
    assert {Recipe(seed=1): "a"}[Recipe(seed=1)] == "a"
    assert Recipe(seed=1) != Recipe(seed=2)


def test_the_order_of_techniques_does_not_matter():
    forward, backward = Recipe(), Recipe()
    for technique in ALL:
        forward |= technique
    for technique in reversed(ALL):
        backward |= technique
    assert forward == backward
    assert hash(forward) == hash(backward)
    assert forward.id == backward.id
    assert [t.stage for t in forward.techniques] == sorted(t.stage for t in ALL)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gpt2"}, {"corpus": "other.txt"}, {"effective_batch_size": 16}, {"sequence_length": 64},
        {"steps": 41}, {"learning_rate": 1e-4}, {"dropout": 0.0}, {"seed": 1}, {"techniques": (Lora(),)},
        {"evaluation_batch_size": 2},
    ],
)  # fmt: skip
def test_every_field_changes_the_id(change):
    assert Recipe(**change).id != Recipe().id


def test_an_evaluation_as_it_always_was_leaves_the_ids_of_older_records():
    assert "evaluation_batch_size" not in Recipe().to_dict()
    assert Recipe.from_dict(Recipe(evaluation_batch_size=4).to_dict()).evaluation_batch_size == 4


def test_the_id_is_twelve_hexadecimal_digits_and_stays_the_same():
    assert re.fullmatch("[0-9a-f]{12}", Recipe().id)
    assert Recipe().id == Recipe().id


def test_a_setting_of_a_technique_changes_the_id():
    assert (Recipe() | Lora(rank=4)).id != (Recipe() | Lora(rank=8)).id


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Recipe(learning_rate=1), Recipe(learning_rate=1.0)),
        (Recipe(dropout=0), Recipe(dropout=0.0)),
        (Recipe() | Lora(alpha=16), Recipe() | Lora(alpha=16.0)),
    ],
)
def test_a_number_written_as_an_integer_gives_the_same_id(one, other):
    assert one == other
    assert one.id == other.id


@pytest.mark.parametrize("techniques", [(), ALL[:1], ALL])
def test_json_and_back(techniques):
    recipe = Recipe(model="random:gpt2", learning_rate=3e-4, seed=7, techniques=techniques)
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe
    assert again.id == recipe.id


def test_an_unknown_field_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"recipe has no field 'stepz'. Known: .*learning_rate.*steps"):
        Recipe.from_dict({"stepz": 3})


def test_an_unknown_technique_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"no technique 'loraa'. Known: .*gradient_checkpointing, .*lora, "):
        Recipe.from_dict({"techniques": {"loraa": {}}})


def test_an_unknown_setting_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"lora has no setting 'r'. Known: rank, alpha, dropout, targets"):
        Recipe.from_dict({"techniques": {"lora": {"r": 8}}})


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("effective_batch_size", 0, "an integer of at least 1"),
        ("effective_batch_size", 2.5, "an integer of at least 1"),
        ("sequence_length", 1, "an integer of at least 2"),
        ("steps", 0, "an integer of at least 1"),
        ("steps", "40", "an integer of at least 1"),
        ("learning_rate", 0.0, "a number of at least 1e-09 and at most 10.0 or none"),
        ("learning_rate", "1e-3", "a number of at least 1e-09 and at most 10.0 or none"),
        ("learning_rate", float("nan"), "a number of at least 1e-09"),
        ("learning_rate", float("inf"), "at most 10.0"),
        ("dropout", 1.0, "at most 0.9"),
        ("seed", -1, "an integer of at least 0"),
        ("model", None, "a text"),
        ("corpus", 3, "a text"),
    ],
)
def test_a_value_out_of_range_is_named_with_field_and_cure(field, value, cure):
    with pytest.raises(ConfigurationError) as caught:
        Recipe(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"recipe: {field} must be")
    assert cure in message
    assert message.endswith(f"got {value!r}.")


def test_a_seed_that_numpy_cannot_take_is_refused_before_the_run():
    with pytest.raises(ConfigurationError, match="recipe: seed must be .* got 4294967296"):
        Recipe(seed=2**32)


def test_a_technique_given_twice_is_an_error():
    with pytest.raises(ConfigurationError, match="lora is given twice. Keep one"):
        Recipe() | Lora(rank=4) | Lora(rank=8)


def test_what_is_no_technique_is_refused():
    with pytest.raises(ConfigurationError, match=r"'lora' is not a technique. Write for example Lora\(rank=8\)"):
        Recipe(techniques=("lora",))
    with pytest.raises(TypeError):
        Recipe() | "lora"


@pytest.mark.parametrize("order", [(Prefix(), GradientCheckpointing()), (GradientCheckpointing(), Prefix())])
def test_techniques_that_exclude_each_other_are_both_named_and_the_capability(order):
    with pytest.raises(ConfigurationError) as caught:
        Recipe(techniques=order)
    expected = (
        "prefix brings a key-value cache during training, which gradient_checkpointing forbids. Drop one of the two."
    )
    assert expected in str(caught.value)


def test_a_capability_nobody_forbids_is_welcome():
    assert (Recipe() | Prefix() | Lora()).label == "lora + prefix"


def test_a_batch_that_does_not_divide_is_refused_with_the_steps_that_would():
    with pytest.raises(ConfigurationError, match="a batch of 8 cannot be split into 3 .* for this batch: 2, 4, 8"):
        Recipe(effective_batch_size=8) | GradientAccumulation(steps=3)


def test_a_change_of_the_batch_checks_the_techniques_again():
    recipe = Recipe(effective_batch_size=8) | GradientAccumulation(steps=4)
    with pytest.raises(ConfigurationError, match="a batch of 6 cannot be split into 4"):
        dataclasses.replace(recipe, effective_batch_size=6)


def test_the_baseline_differs_in_the_techniques_alone():
    recipe = Recipe(steps=9, seed=3)
    for technique in ALL:
        recipe |= technique
    assert recipe.baseline == Recipe(steps=9, seed=3)


@pytest.mark.parametrize(
    ("techniques", "label"),
    [
        ((), "baseline"),
        ((Lora(),), "lora"),
        ((Lora(rank=4),), "lora(rank=4)"),
        ((MixedPrecision(), GradientAccumulation(steps=2)), "gradient_accumulation(steps=2) + mixed_precision"),
    ],
)
def test_the_label_names_techniques_and_changed_settings(techniques, label):
    assert Recipe(techniques=techniques).label == label


def test_a_plain_run_has_one_micro_batch():
    arguments = Recipe(effective_batch_size=8, steps=5, seed=2).training_arguments()
    assert arguments == {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 5, "seed": 2,
    }  # fmt: skip
