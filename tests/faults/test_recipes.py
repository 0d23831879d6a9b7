"""Recipes from JSON files and command lines that nobody would write on purpose: a recipe, or an error with a cure."""

import json
import re
import tomllib
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workbench.advise.frame import to_frame
from workbench.base.categories import parse_bytes
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record
from workbench.recipe import Recipe, as_command, as_toml, parse_recipe
from workbench.techniques import REGISTRY, Lora, parse_technique, technique

QUICK = settings(max_examples=120, deadline=None)
LONG = 10**5000  # more digits than Python writes
NUMBERS = st.one_of(st.integers(), st.sampled_from([2**63, 10**400, 10**4200, 2**31, 0, True]), st.floats())
TEXTS = st.one_of(
    st.text(st.characters(), max_size=6),
    st.sampled_from(
        ["", " ", "\0", "\ud800", "caf\udce9.txt", "1e-4", "8", "five", "none", "\x1b[31m", "lora", "name"]
    ),
)
KEYS = st.one_of(
    st.sampled_from([*Recipe.__dataclass_fields__, *Lora.__dataclass_fields__, *vars(Lora), *REGISTRY, "stage"]),
    st.text(max_size=4), st.integers(), st.none(),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
SETTINGS = st.one_of(st.dictionaries(KEYS, VALUES, max_size=3), VALUES)
TECHNIQUES = st.one_of(st.dictionaries(st.one_of(st.sampled_from(list(REGISTRY)), KEYS), SETTINGS, max_size=3), VALUES)
RECIPES = st.one_of(
    st.fixed_dictionaries({}, optional=dict.fromkeys(Recipe.__dataclass_fields__, VALUES) | {"techniques": TECHNIQUES}),
    st.dictionaries(KEYS, VALUES, max_size=3),
    VALUES,
)


def usable(recipe: Recipe) -> str:
    """It can be written, read again, shown and recorded."""
    plain = json.dumps(recipe.to_dict(), allow_nan=False, ensure_ascii=False)
    plain.encode()
    assert Recipe.from_dict(json.loads(plain)) == recipe
    recipe.label.encode()
    as_command(recipe).encode()
    assert Recipe.from_dict(tomllib.loads(as_toml(recipe))) == recipe
    return "recipe"


@QUICK
@given(st.lists(st.one_of(TEXTS, st.from_regex(r"[a-z_.]{1,20}=.{0,9}"), st.builds("{}={}".format, KEYS, VALUES))))
@example(["callbacks=[[1]]"])
@example(["=\0"])
@example(["arguments.weight_decay=" + "[" * 5000])
@example(["steps=" + "9" * 5000])
@example(["arguments.callbacks=none", "technique.lora.rank = 4 "])
@example(['technique."lora".rank=4'])
def test_any_changes_of_a_command_line_are_a_recipe_or_refused(changes):
    with suppress(ConfigurationError):
        usable(parse_recipe({}, [], changes))


@QUICK
@given(RECIPES)
@example({"techniques": {"lora": {"name": "x"}}})
@example({"techniques": {"lora": {"rank": 10**4200}}})
@example({"effective_batch_size": 2**20, "techniques": {"gradient_accumulation": {"steps": 3}}})
@example({"effective_batch_size": 2**20, "techniques": {"batch_size": {"size": 3}}})
@example({"sequence_length": 2**20, "techniques": {"sequence_length": {"tokens": 3}}})
def test_any_json_is_a_recipe_or_refused(data):
    try:
        recipe = Recipe.from_dict(data)
    except ConfigurationError as error:
        refused = str(error)
    else:
        refused = usable(recipe)
    assert re.match(r"recipe|\w+( has no setting| takes each setting|:)", refused)
    assert len(refused) < 1000


@QUICK
@given(
    st.dictionaries(st.sampled_from([f for f in Recipe.__dataclass_fields__ if f != "techniques"]), TEXTS), TEXTS, TEXTS
)
@example({"steps": "9" * 5000}, "lora", "8")
@example({"learning_rate": "1e400"}, "lora=rank", "8")
@example({}, "lora=rank", "9" * 5000)
def test_any_words_of_a_command_line_are_a_recipe_or_refused(values, name, value):
    with suppress(ConfigurationError):
        usable(parse_recipe(values, [f"{name}:{value}"]))


WRONG = (
    (["lora"], "recipe takes each field by its name, as in {name: value}, got ['lora']."),
    (None, "recipe takes each field by its name, as in {name: value}, got None."),
    ({1: 2}, "recipe has no field 1. Known: arguments, "),
    ({"learnin_rate": 1e-3}, "Did you mean learning_rate?"),
    ({"techniques": ["lora"]}, "recipe takes each technique by its name, as in {name: value}, got ['lora']."),
    ({"techniques": None}, "recipe takes each technique by its name, as in {name: value}, got None."),
    ({"techniques": {"lorra": {}}}, "Did you mean lora?"),
    ({"techniques": {None: {}}}, "recipe has no technique None. Known: activation_offloading, "),
    ({"techniques": {"lora": None}}, "lora takes each setting by its name, as in {name: value}, got None."),
    ({"techniques": {"lora": [8]}}, "lora takes each setting by its name, as in {name: value}, got [8]."),
    ({"techniques": {"lora": {"name": "x"}}}, "lora has no setting 'name'. Known: rank, alpha, dropout, targets."),
    ({"techniques": {"lora": {"stage": 1}}}, "lora has no setting 'stage'. Known: rank, "),
    ({"techniques": {"lora": {"attacks": []}}}, "lora has no setting 'attacks'. Known: rank, "),
    ({"techniques": {"lora": {2: 1}}}, "lora has no setting 2. Known: rank, "),
    ({"techniques": {"lora": {"rnak": 1}}}, "Did you mean rank?"),
    ({"techniques": {"lora": {"rank": True}}}, "lora: rank must be an integer of at least 1, got True."),
    ({"techniques": {"lora": {"rank": "8"}}}, "lora: rank must be an integer of at least 1, got '8'."),
    ({"techniques": {"lora": {"alpha": 10**400}}}, "lora: alpha must be a number of at least 0.001 and below 2^63"),
    ({"techniques": {"lora": {"targets": ""}}}, "lora: targets must be a text, not empty and all of it Unicode"),
    ({"learning_rate": "1e-4"}, "recipe: learning_rate must be a number of at least 1e-09 and at most 10.0"),
    ({"effective_batch_size": "8"}, "batch_size must be an integer of at least 1 and at most 1048576, got '8'."),
    ({"effective_batch_size": 10**9}, "of at least 1 and at most 1048576, got 1000000000."),
    ({"dropout": 5.0}, "recipe: dropout must be a number of at least 0.0 and at most 0.9 or none, got 5.0."),
    ({"dropout": "five"}, "recipe: dropout must be a number of at least 0.0 and at most 0.9 or none, got 'five'."),
    ({"steps": 2**63}, "recipe: steps must be an integer of at least 1 and below 2^63, got 9223372036854775808."),
    ({"steps": LONG}, "recipe: steps must be an integer of at least 1 and below 2^63, got a int that is too long"),
    ({"seed": {"a": [1]}}, "recipe: seed must be an integer of at least 0 and at most 4294967295, got {'a': [1]}."),
    ({"corpus": ""}, "recipe: corpus must be a text, not empty and all of it Unicode"),
    ({"corpus": "caf\udce9.txt"}, "(rename a file whose name is not), got 'caf\\udce9.txt'."),
    ({"model": "a\0b"}, "recipe: model must be a text, not empty and all of it Unicode"),
    ({"model": " \n"}, "recipe: model must be a text, not empty and all of it Unicode"),
)  # fmt: skip


def test_what_is_wrong_is_named_with_the_cure(subtests):
    for data, message in WRONG:
        with subtests.test(message):
            with pytest.raises(ConfigurationError) as caught:
                Recipe.from_dict(data)
            assert message in str(caught.value)


def test_techniques_are_a_list_of_techniques(subtests):
    for no_list in (None, 5, "lora", Lora(), {"lora": {}}):
        message = "recipe: techniques must be a list of them, got"
        with subtests.test(techniques=no_list), pytest.raises(ConfigurationError, match=message):
            Recipe(techniques=no_list)
    for others in ([Lora], ["lora"], [None], [[Lora()]]):
        message = r"is not a technique. Write for example Lora\(rank=8\)"
        with subtests.test(techniques=others), pytest.raises(ConfigurationError, match=message):
            Recipe(techniques=others)


def test_a_technique_has_no_setting_called_name_either():
    with pytest.raises(ConfigurationError, match="lora has no setting 'name'. Known: rank"):
        technique("lora", name="dora")
    with pytest.raises(ConfigurationError, match=r"There is no technique 'lorra'. Known: .* Did you mean lora\?"):
        parse_technique("lorra")


def test_a_cap_that_no_record_can_hold_is_refused(subtests):
    message = "is not an amount of memory. Write a number above zero and its unit, less than 2^63 bytes"
    amounts = ("99999999999GiB", "9" * 400 + "GiB", "9" * 5000 + "B", 2**63, LONG, -LONG, f"{2**63}B", "\ud800GiB")
    for number, amount in enumerate(amounts):
        with subtests.test(number=number):
            with pytest.raises(ConfigurationError) as caught:
                parse_bytes(amount, "memory_cap")
            assert message in str(caught.value)
            assert len(str(caught.value)) < 400


@settings(max_examples=60, deadline=None)
@given(st.one_of(NUMBERS, TEXTS, st.from_regex(r"[0-9]{1,40}(\.[0-9]{1,40})? ?(GiB|MB|B|kb)", fullmatch=True)))
def test_every_amount_that_is_accepted_can_stand_in_a_table(amount):
    try:
        cap = parse_bytes(amount, "memory_cap")
    except ConfigurationError:
        return
    assert to_frame([Record.start(Recipe(), memory_cap_bytes=cap)])["memory_cap_bytes"].iloc[0] == cap
