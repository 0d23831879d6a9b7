import dataclasses
import fnmatch
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from workbench.base.errors import ConfigurationError
from workbench.base.paths import ROOT
from workbench.recipe import DECIDED, Recipe, as_command, as_toml, parse_recipe, read_recipe
from workbench.techniques import (
    REGISTRY,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    StepInBackward,
)
from workbench.techniques.base import Capability, Technique
from workbench.training.arguments import build_training_arguments, complete_arguments

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


CHANGES = {
    "model": "gpt2", "corpus": "other.txt", "effective_batch_size": 16, "sequence_length": 64, "steps": 41,
    "learning_rate": 1e-4, "dropout": 0.0, "seed": 1, "techniques": (Lora(),), "evaluation_batch_size": 2,
    "arguments": {"weight_decay": 0.1}, "callbacks": ("a.b:C",),
}  # fmt: skip


def test_every_field_changes_the_id(subtests):
    assert CHANGES.keys() == {field.name for field in dataclasses.fields(Recipe)}
    for field, value in CHANGES.items():
        with subtests.test(field=field):
            assert Recipe(**{field: value}).id != Recipe().id


def test_fields_that_came_later_leave_the_ids_of_older_records():
    assert not {"evaluation_batch_size", "arguments", "callbacks"} & Recipe().to_dict().keys()
    assert (Recipe().id, (Recipe(model="gpt2", seed=3) | Lora(rank=4)).id) == ("88e70bacb504", "9859f20ae289")
    assert Recipe.from_dict(Recipe(evaluation_batch_size=4).to_dict()).evaluation_batch_size == 4


def test_the_id_is_twelve_hexadecimal_digits_and_stays_the_same():
    assert re.fullmatch("[0-9a-f]{12}", Recipe().id)
    assert Recipe().id == Recipe().id


def test_a_setting_of_a_technique_changes_the_id():
    assert (Recipe() | Lora(rank=4)).id != (Recipe() | Lora(rank=8)).id


def test_a_number_written_as_an_integer_gives_the_same_id(subtests):
    for integer, number in (
        (Recipe(learning_rate=1), Recipe(learning_rate=1.0)),
        (Recipe(dropout=0), Recipe(dropout=0.0)),
        (Recipe() | Lora(alpha=16), Recipe() | Lora(alpha=16.0)),
    ):
        with subtests.test(integer=integer):
            assert integer == number
            assert integer.id == number.id


def test_json_and_back(subtests):
    for techniques in ((), ALL[:1], ALL):
        with subtests.test(techniques=techniques):
            recipe = Recipe(model="random:gpt2", learning_rate=3e-4, seed=7, techniques=techniques)
            again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
            assert again == recipe
            assert again.id == recipe.id


UNKNOWN = [
    ({"stepz": 3}, "recipe has no field 'stepz'. Known: .*learning_rate.*steps"),
    ({"techniques": {"loraa": {}}}, "no technique 'loraa'. Known: .*gradient_checkpointing, .*lora, "),
    ({"techniques": {"lora": {"r": 8}}}, "lora has no setting 'r'. Known: rank, alpha, dropout, targets"),
]
OUT_OF_RANGE = [
    ("effective_batch_size", 0, "an integer of at least 1 and at most 1048576"),
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
    ("seed", 2**32, "at most 4294967295"),  # which numpy could not take
    ("model", None, "a text"),
    ("corpus", 3, "a text"),
]


def test_what_is_unknown_is_named_with_what_is_known(subtests):
    for fields, message in UNKNOWN:
        with subtests.test(fields=fields), pytest.raises(ConfigurationError, match=message):
            Recipe.from_dict(fields)


def test_a_value_out_of_range_is_named_with_field_and_cure(subtests):
    for field, value, cure in OUT_OF_RANGE:
        with subtests.test(field=field, value=value):
            with pytest.raises(ConfigurationError) as caught:
                Recipe(**{field: value})
            message = str(caught.value)
            assert message.startswith(f"recipe: {field} must be")
            assert cure in message
            assert message.endswith(f"got {value!r}.")


def test_a_technique_given_twice_is_an_error():
    with pytest.raises(ConfigurationError, match="lora is given twice. Keep one"):
        Recipe() | Lora(rank=4) | Lora(rank=8)


def test_what_is_no_technique_is_refused():
    with pytest.raises(ConfigurationError, match=r"'lora' is not a technique. Write for example Lora\(rank=8\)"):
        Recipe(techniques=("lora",))
    with pytest.raises(TypeError):
        Recipe() | "lora"


def test_techniques_that_exclude_each_other_are_both_named_and_the_capability():
    expected = (
        "prefix brings a key-value cache during training, which gradient_checkpointing forbids. Drop one of the two."
    )
    for order in ((Prefix(), GradientCheckpointing()), (GradientCheckpointing(), Prefix())):
        with pytest.raises(ConfigurationError) as caught:
            Recipe(techniques=order)
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


def test_the_label_names_techniques_and_changed_settings():
    labels = {
        (): "baseline",
        (Lora(),): "lora",
        (Lora(rank=4),): "lora(rank=4)",
        (MixedPrecision(), GradientAccumulation(steps=2)): "gradient_accumulation(steps=2) + mixed_precision",
    }
    assert {techniques: Recipe(techniques=techniques).label for techniques in labels} == labels


def test_a_plain_run_has_one_micro_batch():
    arguments = Recipe(effective_batch_size=8, steps=5, seed=2).training_arguments()
    assert arguments == {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 5, "seed": 2,
    }  # fmt: skip


WHOLE = Recipe(
    model="gpt2", corpus='a "b"\\ c\x7f😀.txt', steps=50, learning_rate=1e-5, dropout=0.0, callbacks=["a.b:C"],
    arguments={
        "weight_decay": 0.1, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 2}, "tf": True,
        "report_to": ("trackio", "tensorboard"), "run_name": "x = 1", "adam_epsilon": 1e-08, "debug": "",
    },
    techniques=(Lora(rank=16, alpha=0.5), GradientCheckpointing()),
)  # fmt: skip


def parsed_command(command):
    """The recipe that its options give, after `python -m workbench run MODEL`."""
    model, *words = shlex.split(command)[4:]
    options = list(zip(words[::2], words[1::2], strict=True))
    lists = {name: [value for option, value in options if option == name] for name in ("--technique", "--set")}
    fields = {name.removeprefix("--").replace("-", "_"): value for name, value in options if name not in lists}
    return parse_recipe({"model": model, **fields}, lists["--technique"], lists["--set"])


def test_a_file_and_a_command_give_the_recipe_again(tmp_path, subtests):
    path = tmp_path / "recipe.toml"
    for recipe in (Recipe(), WHOLE, WHOLE.baseline):
        with subtests.test(recipe=recipe):
            path.write_text(as_toml(recipe), encoding="utf-8")
            assert read_recipe(path) == parse_recipe({}, file=read_recipe(path)) == recipe
            assert read_recipe(path).id == recipe.id
            assert parsed_command(as_command(recipe)) == recipe


def test_a_file_says_what_is_not_as_by_default():
    assert as_toml(Recipe(model="gpt2")) == 'model = "gpt2"\n'
    assert as_toml(Recipe(steps=5, arguments={"weight_decay": 0.1}) | Lora(rank=16) | GradientCheckpointing()) == (
        'model = "auto"\nsteps = 5\n\n[technique.gradient_checkpointing]\n\n[technique.lora]\nrank = 16\n\n'
        "[arguments]\nweight_decay = 0.1\n"
    )


FILE = """
model = "gpt2"  # a comment
steps = 50
[technique.lora]
rank = 16
alpha = 32
[technique.gradient_checkpointing]
[arguments]
weight_decay = 0.1
"""


OVER_THE_FILE = [  # options, techniques, changes, and what is otherwise than in the file
    ({}, [], [], {}),
    ({"steps": "7", "learning_rate": "1e-3"}, [], ["steps=9"], {"steps": 7, "learning_rate": 1e-3}),
    ({}, [], ["technique.lora.rank=4"], {"lora": Lora(rank=4, alpha=32)}),
    ({}, ["lora=rank:4"], ["technique.lora.rank=8"], {"lora": Lora(rank=4)}),
    ({}, [], ["technique.lora={}"], {"lora": Lora()}),
    ({}, [], ["arguments.lr_scheduler_kwargs.num_cycles=2", "arguments.run_name=mine"],
     {"arguments": {"weight_decay": 0.1, "lr_scheduler_kwargs": {"num_cycles": 2}, "run_name": "mine"}}),
    ({}, [], ["arguments={}"], {"arguments": {}}),
    ({}, [], ["model=gpt2-tiny", "corpus=./a b.txt"], {"model": "gpt2-tiny", "corpus": "./a b.txt"}),
    ({"learning_rate": "none"}, [], ["learning_rate=0.1"], {}),
]  # fmt: skip


def test_options_go_over_changes_and_these_over_the_file(tmp_path, subtests):
    path = tmp_path / "r.toml"
    path.write_text(FILE, encoding="utf-8")
    file = {"model": "gpt2", "steps": 50, "arguments": {"weight_decay": 0.1}, "lora": Lora(rank=16, alpha=32)}
    for options, techniques, changes, otherwise in OVER_THE_FILE:
        with subtests.test(options=options, techniques=techniques, changes=changes):
            fields = {**file, **otherwise}
            expected = Recipe(techniques=(fields.pop("lora"), GradientCheckpointing()), **fields)
            assert parse_recipe(options, techniques, changes, read_recipe(path)) == expected


def test_changes_need_no_file_and_can_leave_the_techniques_out(tmp_path):
    assert parse_recipe({"model": "gpt2"}, [], ["technique.lora.rank=4", "steps=3"]) == Recipe("gpt2", steps=3) | Lora(
        rank=4
    )
    (tmp_path / "r.toml").write_text(FILE, encoding="utf-8")
    assert parse_recipe({}, [], ["technique={}"], read_recipe(tmp_path / "r.toml")).label == "baseline"


def test_files_of_before_are_read_and_changed_too(tmp_path):
    (tmp_path / "r.toml").write_text('model = "gpt2"\n[techniques.lora]\nrank = 16\nalpha = 32.0\n', encoding="utf-8")
    found = parse_recipe({}, [], ["technique.lora.rank=4"], read_recipe(tmp_path / "r.toml"))
    assert found == Recipe("gpt2") | Lora(rank=4, alpha=32)


def test_a_file_is_found_from_the_working_directory_and_so_are_its_paths(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "r.toml").write_text('corpus = "a.txt"', encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    assert read_recipe("inside/r.toml").corpus == "a.txt"


UNUSABLE = [
    ("steps = 5\nmodel gpt2", "r.toml cannot be read .Expected '=' .*at line 2.*Write for example: steps = 50"),
    ("steps = 5\nsteps = 6", "Cannot overwrite a value"),
    ("stepz = 5", "recipe has no field 'stepz'.*Did you mean steps"),
    ("[technique.lorra]", "recipe has no technique 'lorra'.*Did you mean lora"),
    ("[technique.lora]\nrnk = 5", "lora has no setting 'rnk'.*Did you mean rank"),
    ("[technique.lora]\nrank = 'x'", "lora: rank must be an integer of at least 1, got 'x'"),
    ("technique = 5", "recipe takes each technique by its name"),
    ("steps = '5'", "recipe: steps must be an integer of at least 1, got '5'"),
    ("steps = 2026-11-23", "recipe: steps must be an integer of at least 1"),
    ("arguments = 5", "these arguments cannot be kept in a file"),
    ("arguments.weight_decay = 2026-11-23", "these arguments cannot be kept in a file .datetime.date"),
    ("callbacks = 'a'", "callbacks are named 'package.module:Class', got .'a'."),
    ("callbacks = ['a:b', 5]", "callbacks are named 'package.module:Class', got .'a:b', 5."),
    ("callbacks = ['a:b(1)']", "callbacks are named 'package.module:Class'"),
    ("\udcff", "cannot be read .'utf-8' codec can't decode"),
]
DECIDED_ELSEWHERE = [
    ({"per_device_train_batch_size": 4}, "Use the field effective_batch_size"),
    ({"max_steps": 4}, "Use the field steps"),
    ({"bf16": True}, "Use the technique mixed_precision"),
    ({"gradient_checkpointing": True}, "Use the technique gradient_checkpointing"),
    ({"activation_checkpointing_kwargs": {"a": 1}}, "Use the technique gradient_checkpointing"),
    ({"optim": "adafactor"}, "Use the technique optimizer"),
    ({"optim": "paged_adamw_8bit"}, "Use the technique optimizer"),
    ({"output_dir": "x"}, "set WORKBENCH_RUNS"),
    ({"seed": 4}, "Use the field seed"),
    ({"hub_token": "secret"}, "push that folder yourself"),
    ({"weight_decay": None}, "cannot be kept in a file .None cannot be written"),
    ({"weight_decay": float("nan")}, "cannot be kept in a file"),
    ({"warmup_steps": 2**63}, "cannot be kept in a file"),
    ({"a b": 1}, "cannot be kept in a file"),
    (["weight_decay"], "cannot be kept in a file"),
]


def test_a_file_that_cannot_be_used_is_said(tmp_path, subtests):
    path = tmp_path / "r.toml"
    for text, message in UNUSABLE:
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        with subtests.test(text=text), pytest.raises(ConfigurationError, match=f"(?s){message}"):
            read_recipe(path)
    with pytest.raises(ConfigurationError, match="cannot be read .*No such file"):
        read_recipe(tmp_path / "missing.toml")
    with pytest.raises(ConfigurationError, match="cannot be read .*Is a directory|Permission"):
        read_recipe(tmp_path)


def test_an_argument_that_is_decided_elsewhere_is_refused_with_what_to_use(subtests):
    for arguments, message in DECIDED_ELSEWHERE:
        with subtests.test(arguments=arguments), pytest.raises(ConfigurationError, match=f"recipe: .*{message}"):
            Recipe(arguments=arguments)


def test_the_table_of_what_is_decided_names_arguments_and_techniques_that_there_are():
    from transformers import TrainingArguments

    known = [field.name for field in dataclasses.fields(TrainingArguments)]
    for patterns, words in DECIDED.items():
        for pattern in patterns.split():
            assert fnmatch.filter(known, pattern.partition("=")[0]), pattern
        for name in re.findall(r"techniques? ([a-z_]+)", words):
            assert name in REGISTRY
        for name in re.findall(r"field ([a-z_]+)", words):
            assert name in Recipe.__dataclass_fields__


def test_an_argument_that_a_technique_decides_is_refused_with_its_name(subtests):
    for argument, value, technique in (("max_grad_norm", 1.0, StepInBackward()), ("optim", "rmsprop", Optimizer())):
        message = f"arguments has {argument}, which {technique.name} decides"
        with subtests.test(argument=argument), pytest.raises(ConfigurationError, match=message):
            Recipe(arguments={argument: value}) | technique


def test_a_later_change_of_what_was_given_changes_no_recipe():
    given = {"weight_decay": 0.1}
    recipe = Recipe(arguments=given)
    given["weight_decay"] = 0.2
    assert recipe.arguments == {"weight_decay": 0.1}
    assert hash(recipe) == hash(Recipe(arguments={"weight_decay": 0.1}))


def test_the_file_on_the_page_of_recipe_files_is_one(tmp_path):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (text,) = re.findall("```toml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert Recipe.from_dict(tomllib.loads(as_toml(recipe))) == recipe
    assert recipe.label == "gradient_checkpointing + lora(rank=16)"
    asked = build_training_arguments(complete_arguments(recipe, 1e-3), "cpu", tmp_path)
    assert {
        name: getattr(asked, name) for name in recipe.arguments if name not in ("report_to", "num_train_epochs")
    } == {name: value for name, value in recipe.arguments.items() if name not in ("report_to", "num_train_epochs")}
    for line in re.findall(r"^workbench \w+ recipe.toml (.*?)(?: *#.*)?$", page, flags=re.MULTILINE):
        words = shlex.split(line)
        changes = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert parse_recipe({}, [], changes, recipe)


def test_the_model_of_auto_is_the_one_that_a_run_would_train_on_this_machine(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for has_gpu, model in ((False, "gpt2-tiny"), (True, "gpt2")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        assert Recipe().config.n_embd == Recipe(model=model).config.n_embd


def test_a_recipe_knows_its_model(recipe):
    lora = recipe | Lora()
    model = lora.load()
    assert lora.config.vocab_size == model.config.vocab_size
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"default"}
    first, second = (lora.load().state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_title_of_a_recipe_says_what_its_label_says_in_the_words_of_prose():
    assert Recipe().title == "full fine-tuning"
    assert (Recipe() | Lora(rank=2)).title == "LoRA (rank=2)"
    assert (Recipe() | FusedGelu() | GradientCheckpointing()).title == "fused GELU + gradient checkpointing"
