import json
import math
import tomllib
from dataclasses import dataclass, fields

import pytest

from workbench.base.errors import ConfigurationError
from workbench.base.settings import (
    check_settings,
    describe_field,
    merge_settings,
    parse_assignment,
    parse_settings,
    setting,
    toml,
)


@dataclass(frozen=True)
class Oven:
    shelves: int = setting(2, "how many", minimum=1, maximum=4)
    heat: float = setting(180.0, "how hot", minimum=50.0)
    fan: bool = setting(False, "whether air moves")
    mode: str = setting("top", "where the heat comes from", choices=("top", "bottom"))
    timer: int | None = setting(None, "minutes", minimum=1)
    serial: str = ""  # no setting


def test_a_setting_keeps_its_default_and_describes_itself():
    heat = next(field for field in fields(Oven) if field.name == "heat")
    assert Oven().heat == 180.0
    assert heat.metadata["help"] == "how hot"


DESCRIBED = {
    "shelves": "an integer of at least 1 and at most 4",
    "heat": "a number of at least 50.0",
    "fan": "true or false",
    "mode": "one of top, bottom",
    "timer": "an integer of at least 1 or none",
}
INSIDE = [
    {}, {"shelves": 1}, {"shelves": 4}, {"heat": 50}, {"heat": 1e9}, {"fan": True}, {"mode": "bottom"}, {"timer": 1},
]  # fmt: skip
OUTSIDE = [
    ("shelves", 0), ("shelves", 5), ("shelves", 2.0), ("shelves", "2"), ("shelves", None), ("shelves", True),
    ("heat", 49.9), ("heat", "180"), ("heat", float("nan")), ("heat", False), ("fan", 1), ("fan", "yes"),
    ("mode", "left"), ("mode", None), ("timer", 0), ("timer", 1.5),
]  # fmt: skip


def test_settings_are_described_in_words():
    assert {field.name: describe_field(field) for field in fields(Oven) if field.name in DESCRIBED} == DESCRIBED


def test_values_inside_the_range_and_at_its_ends_pass(subtests):
    for values in INSIDE:
        with subtests.test(values=values):
            check_settings(Oven(**values), "oven")


def test_values_outside_are_refused_naming_owner_field_value_and_cure(subtests):
    for name, value in OUTSIDE:
        with subtests.test(name=name, value=value):
            with pytest.raises(ConfigurationError) as caught:
                check_settings(Oven(**{name: value}), "oven")
            assert str(caught.value) == f"oven: {name} must be {DESCRIBED[name]}, got {value!r}."


def test_a_field_that_is_no_setting_is_not_checked():
    check_settings(Oven(serial=17), "oven")


READABLE = [
    ({"shelves": "3"}, {"shelves": 3}), ({"heat": "2e2"}, {"heat": 200.0}), ({"fan": "Yes"}, {"fan": True}),
    ({"fan": "0"}, {"fan": False}), ({"mode": "bottom"}, {"mode": "bottom"}), ({"timer": "None"}, {"timer": None}),
    ({"timer": "5"}, {"timer": 5}), ({}, {}), ({"timer": "1,024"}, {"timer": 1024}),
]  # fmt: skip


def test_parse_gives_values_of_the_fields_types(subtests):
    for text, values in READABLE:
        with subtests.test(text=text):
            parsed = parse_settings(Oven, text, "oven")
            assert parsed == values
            assert [type(value) for value in parsed.values()] == [type(value) for value in values.values()]


def test_parse_names_field_and_text_that_cannot_be_read(subtests):
    for name, text in [
        ("shelves", "2.5"),
        ("shelves", "1,5"),
        ("heat", "1,024"),
        ("shelves", ""),
        ("heat", "hot"),
        ("fan", "maybe"),
    ]:
        words = f"oven: {name} must be .*, got {text!r}"
        with subtests.test(name=name, text=text), pytest.raises(ConfigurationError, match=words):
            parse_settings(Oven, {name: text}, "oven")


def test_parse_lists_the_known_names_for_an_unknown_one():
    with pytest.raises(
        ConfigurationError, match="oven has no setting 'colour'. Known: shelves, heat, fan, mode, timer."
    ):
        parse_settings(Oven, {"colour": "red"}, "oven")


def test_parse_does_not_take_a_field_that_is_no_setting():
    with pytest.raises(ConfigurationError, match="no setting 'serial'"):
        parse_settings(Oven, {"serial": "17"}, "oven")


WRITTEN = [
    (True, "true"), (3, "3"), (1e-8, "1e-08"), (1e16, "1e+16"), ('a "b" \\ \x7f😀\n', None),
    (["a", ("b", 1.5)], '["a", ["b", 1.5]]'),
    ({"num cycles": {"a": []}}, '{"num cycles" = {"a" = []}}'), ("", '""'),
]  # fmt: skip


def test_what_toml_writes_it_reads(subtests):
    for value, text in WRITTEN:
        with subtests.test(value=value):
            assert text is None or toml(value) == text
            read = tomllib.loads(f"it = {toml(value)}")["it"]
            assert read == json.loads(json.dumps(value))
            assert type(read) is type(value) or isinstance(value, tuple | str)


def test_what_toml_or_a_record_cannot_hold_is_refused(subtests):
    words = r"cannot be written|not JSON compliant"
    for value in (None, math.nan, math.inf, 2**63, "\ud800", "a\0b", [None], {"a": {1}}, b"x"):
        with subtests.test(value=repr(value)), pytest.raises(ValueError, match=words):
            toml(value)


TYPED = {
    "steps=5": {"steps": 5},
    "a.b.c = 1e-4": {"a": {"b": {"c": 1e-4}}},
    "a=true": {"a": True},
    "a=cosine": {"a": "cosine"},
    'a="1984"': {"a": "1984"},
    "a=[1, 'b']": {"a": [1, "b"]},
    "a={b = 1}": {"a": {"b": 1}},
    "corpus=./a b=c.txt": {"corpus": "./a b=c.txt"},
    "a=": {"a": ""},
}


def test_a_change_as_it_is_typed():
    assert {text: parse_assignment(text) for text in TYPED} == TYPED
    assert parse_assignment("a=true")["a"] is True


def test_what_is_no_change_is_said(subtests):
    words = "--set: .* is not NAME=VALUE. Write for example technique.lora.rank=16"
    for text in ("", "a", "=", "a=\0", "a b=1", ".a=1", "a..b=1", "a\nb=1"):
        with subtests.test(text=text), pytest.raises(ConfigurationError, match=words):
            parse_assignment(text)


def test_tables_are_merged_and_an_empty_one_empties():
    one = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merge_settings(one, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {
        "a": {"b": 1, "c": {"d": 2, "f": 4}},
        "e": {"g": 5},
    }
    assert merge_settings(one, {"a": {}}) == {"a": {}, "e": 3}
    assert one == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
