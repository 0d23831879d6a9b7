import ast
import dataclasses
from pathlib import Path

import pytest

from workbench import techniques
from workbench.errors import ConfigurationError
from workbench.measure.categories import Category
from workbench.techniques import REGISTRY, Lora, Numerics, Technique, parse_technique, technique

# they change what is trained, which a planner leaves to its user; or are compiled for minutes to be predicted
UNOFFERED = ("batch_size", "sequence_length", "torch_compile")

EVERY = pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)


@EVERY
def test_one_stem_everywhere(cls):
    assert REGISTRY[cls.name] is cls
    assert cls.__module__ == f"workbench.techniques.{cls.name}"
    assert cls.__name__ == cls.name.title().replace("_", "")


def test_type_checkers_and_editors_are_told_of_every_technique():
    lines = ast.parse(Path(techniques.__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    told = {name.asname: line.module for line in lines if isinstance(line, ast.ImportFrom) for name in line.names}
    assert told.items() >= {cls.__name__: cls.__module__ for cls in REGISTRY.values()}.items()
    for name in told:
        assert hasattr(techniques, name)


@EVERY
def test_a_technique_says_what_it_is_for(cls):
    assert issubclass(cls, Technique)
    assert cls.title
    assert cls.costs
    assert set(cls.attacks) < set(Category)
    assert cls.numerics in Numerics
    assert cls().learning_rate_factor > 0


@EVERY
def test_a_technique_is_frozen_and_made_of_documented_settings(cls):
    made = cls()
    assert {made: 1}[cls()] == 1
    for field in dataclasses.fields(cls):
        assert field.metadata["help"]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, field.default)


@EVERY
def test_settings_and_back(cls):
    assert technique(cls.name, **cls().settings()) == cls()
    written = ",".join(f"{name}:{value}" for name, value in cls().settings().items())
    assert parse_technique(f"{cls.name}={written}") == parse_technique(cls.name) == cls()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lora", Lora()),
        ("lora=", Lora()),
        ("lora=rank:4", Lora(rank=4)),
        ("lora=rank:4,alpha:8", Lora(rank=4, alpha=8.0)),
        ("lora= rank : 4 , targets : c_attn+c_fc", Lora(rank=4, targets="c_attn+c_fc")),
    ],
)
def test_the_form_of_the_command_line(text, expected):
    assert parse_technique(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lorra", f"There is no technique 'lorra'. Known: {', '.join(sorted(REGISTRY))}."),
        ("", "There is no technique ''. Known: "),
        ("lora=ranc:4", "lora has no setting 'ranc'. Known: rank, alpha, dropout, targets."),
        ("lora=rank:four", "lora: rank must be an integer of at least 1, got 'four'."),
        ("lora=rank:0", "lora: rank must be an integer of at least 1, got 0."),
        ("lora=rank=4", "lora: 'rank=4' is not a setting. Write name:value, as in lora=rank:8,alpha:16."),
        ("lora=8", "lora: '8' is not a setting. Write name:value"),
        ("lora=rank:4,rank:8", "lora: rank is given twice"),
        ("lora=alpha:inf", "lora: alpha must be"),
        ("mixed_precision=dtype:fp8", "mixed_precision: dtype must be one of bf16, fp16, got 'fp8'."),
    ],
)
def test_what_cannot_be_read_is_named_with_the_cure(text, message):
    with pytest.raises(ConfigurationError) as caught:
        parse_technique(text)
    assert message in str(caught.value)


def test_by_name_and_settings():
    assert technique("lora", rank=4) == Lora(rank=4)
    with pytest.raises(ConfigurationError, match="lora has no setting 'r'. Known: rank"):
        technique("lora", r=4)
    with pytest.raises(ConfigurationError, match="There is no technique 'prefix'. Known: "):
        technique("prefix")


@EVERY
@pytest.mark.parametrize("compute_capability", [None, (7, 5), (9, 0)], ids=["cpu", "t4", "h100"])
def test_a_planner_is_offered_what_saves_and_what_runs_there(cls, compute_capability):
    offered = cls.variants(compute_capability)
    assert all(isinstance(one, cls) for one in offered)
    assert len(set(offered)) == len(offered)
    if not cls.attacks:
        assert offered == ()
    if compute_capability is None:
        assert not any("CUDA" in (one.missing("cpu") or "") for one in offered)
    else:
        assert offered or compute_capability < (8, 0) or cls.name in UNOFFERED or not cls.attacks
