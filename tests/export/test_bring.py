"""Recipes out of other people's files: what becomes of each setting, and what is said of the rest."""

import json
import time
import tomllib
from dataclasses import fields
from itertools import chain

import pytest

from workbench.base.errors import ConfigurationError
from workbench.export.bring import FOREIGN, LIMIT, read_settings
from workbench.export.written import as_toml
from workbench.recipe import Recipe
from workbench.techniques import (
    REGISTRY,
    ActivationOffloading,
    Attention,
    ChunkedCrossEntropy,
    Dora,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    PureBf16,
    Qlora,
)

AXOLOTL = """
base_model: openai-community/gpt2-large
load_in_4bit: true
adapter: qlora
sequence_len: 512
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: someone/chats
    type: alpaca
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
fp16:
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
flash_attention: true
deepspeed: zero2.json
wandb_project: mine
special_tokens:
  pad_token: "<|endoftext|>"
"""
FACTORY = """
### model
model_name_or_path: Qwen/Qwen3-4B
trust_remote_code: true
### method
stage: sft
finetuning_type: lora
lora_rank: 16
lora_alpha: 32
lora_target: q_proj,v_proj,down_proj
template: qwen3
cutoff_len: 256
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
max_steps: 100
num_train_epochs: 3.0
bf16: true
flash_attn: fa2
enable_liger_kernel: true
quantization_bit: 8
"""


def of(text):
    return read_settings(text).recipe


def test_axolotl():
    brought = read_settings(AXOLOTL, Recipe(corpus="mine.txt", steps=7) | Lora(rank=1))
    assert brought.program == "axolotl"
    assert brought.recipe == Recipe(
        model="openai-community/gpt2-large", corpus="mine.txt", effective_batch_size=8, sequence_length=512, steps=7,
        learning_rate=2e-4,
        techniques=(
            Qlora(rank=32, alpha=16, dropout=0.05, targets="all-linear", compute="bfloat16"), PureBf16(),
            GradientAccumulation(steps=4), GradientCheckpointing(), Optimizer(kind="adamw_8bit"),
        ),
    )  # fmt: skip
    left_out = dict(brought.left_out)
    assert left_out.pop("deepspeed: zero2.json") == "several GPUs are not predicted from here"
    assert "steps are counted here" in left_out.pop("num_epochs: 3")
    assert any("pages that move" in words for _, words in brought.understood)
    assert {theirs for theirs, why in left_out.items() if not why} == {
        "lr_scheduler: cosine", "wandb_project: mine", "special_tokens.pad_token: <|endoftext|>",
    }  # fmt: skip


def test_llama_factory():
    brought = read_settings(FACTORY, Recipe(model="gpt2-tiny"))
    assert brought.program == "LLaMA-Factory"
    assert brought.recipe == Recipe(
        model="Qwen/Qwen3-4B", effective_batch_size=8, sequence_length=256, steps=100, learning_rate=1e-4,
        techniques=(
            Lora(rank=16, alpha=32, targets="down_proj+q_proj+v_proj"), PureBf16(), GradientAccumulation(steps=8),
            GradientCheckpointing(use_reentrant=True), ChunkedCrossEntropy(),
        ),
    )  # fmt: skip
    left_out = dict(brought.left_out)
    assert "only 4 bits" in left_out["quantization_bit: 8"]
    assert ("use_reentrant_gc: true (its default)") in dict(brought.understood)


def test_training_arguments_as_transformers_writes_them(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=50,
        activation_checkpointing=True, activation_checkpointing_kwargs={"use_reentrant": True}, bf16=True,
        optim="sgd", optim_args="momentum=0.9", use_cpu=True, seed=9,
    )  # fmt: skip
    brought = read_settings(arguments.to_json_string())
    assert brought.recipe == Recipe(
        effective_batch_size=12, steps=50, seed=9, learning_rate=5e-5,
        techniques=(
            GradientAccumulation(steps=3), GradientCheckpointing(use_reentrant=True), MixedPrecision(),
            Optimizer(kind="sgd_momentum"),
        ),
    )  # fmt: skip
    assert not [pair for pair in brought.left_out if "not known" in pair[1]]


RECIPE = Recipe(
    model='a "gpt2"', corpus="ein Tëxt\x7f\\\t😀.txt", learning_rate=1e-5, dropout=0.0, seed=2**32 - 1,
    techniques=(Lora(rank=3, alpha=0.5), GradientCheckpointing(use_reentrant=True), PureBf16()),
)  # fmt: skip


def test_our_own_files_come_back_as_they_went(subtests):
    for recipe in (Recipe(), RECIPE):
        with subtests.test(recipe=recipe):
            plain = recipe.to_dict()
            assert Recipe.from_dict(tomllib.loads(as_toml(recipe))) == recipe
            for text in (as_toml(recipe), json.dumps(plain), "\ufeff" + json.dumps(plain, indent=1)):
                assert of(text) == recipe
            assert of(json.dumps({"id": "x", "status": "ok", "recipe": plain})) == recipe  # a record


TOGETHER = [
    ("adapter: lora\npeft_use_dora: true\nbf16: false", [Dora()]),
    ("adapter:\nbf16: true", [PureBf16()]),
    ("micro_batch_size: 1\nbf16: false\nfp16: 'true'", [MixedPrecision(dtype="fp16")]),
    ("sequence_len: 8\nbf16: no\neager_attention: yes", [Attention()]),
    (
        "sequence_len: 8\nbf16: no\ngradient_checkpointing: offload_disk",
        [GradientCheckpointing(use_reentrant=True), ActivationOffloading(to="disk")],
    ),
    (
        "finetuning_type: full\nbf16: true\ndisable_gradient_checkpointing: true\noptim: adafactor",
        [MixedPrecision(), Optimizer(kind="adafactor")],
    ),
    ("cutoff_len: 8\nfinetuning_type: full\npure_bf16: true\ndisable_gradient_checkpointing: 'True'", [PureBf16()]),
    (
        "cutoff_len: 8\nlora_target: all\nquantization_bit: 4\ndouble_quantization: false\nflash_attn: disabled\n"
        "disable_gradient_checkpointing: true",
        [Qlora(targets="all-linear", double_quantization=False), Attention()],
    ),
]


def test_what_acts_together_is_read_together(subtests):
    for text, techniques in TOGETHER:
        with subtests.test(text=text):
            assert of(text).techniques == Recipe(techniques=tuple(techniques)).techniques


UNUSABLE = [
    ("", "each setting by its name"),
    ("- a\n- b", "got .'a', 'b'."),
    ("[1, 2]", "each setting by its name"),
    ("just words", "each setting by its name"),
    ('{"steps": ', "cannot be read as JSON"),
    ("steps = \n", "cannot be read as TOML"),
    ("a: b: c", "cannot be read as YAML"),
    ("{}", "no setting is known"),
    ("colour: <b>red</b>", "no setting is known, of 'colour'"),
    ("lora_r: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ("a: &a [x]\nlora_r: [*a, *a]", "has aliases"),
    ("x" * (LIMIT + 1), "it has more than 100,000 characters"),
    ("lora_r: 1\n" * LIMIT, "it has more than 100,000 characters"),
    ('{"recipe":' * 100_000, "cannot be read as JSON"),
    ("[" * 20_000, "cannot be read as YAML"),
    ("micro_batch_size: 0", "axolotl: micro_batch_size: 0.*effective_batch_size must be an integer of at least 1"),
    ("sequence_len: many", "axolotl: sequence_len: many.*sequence_length must be"),
    ("learning_rate: .nan\nadapter: lora", "axolotl: learning_rate: NaN.*must be a number"),
    ("micro_batch_size: two\ngradient_accumulation_steps: 2", "axolotl: micro_batch_size: two.*'two'"),
    ("adapter: lora\nlora_r: -1", "axolotl: adapter: lora, lora_r: -1.*rank must be"),
    ('{"steps": 5, "stepz": 6}', "recipe has no field 'stepz'.*Did you mean steps"),
    ('{"techniques": {"lroa": {}}}', "Did you mean lora"),
    ("[techniques.lora]\nrank = 0", "lora: rank must be an integer of at least 1"),
]


def test_what_cannot_be_used_is_said_at_once(subtests):
    for text, message in UNUSABLE:
        with subtests.test(text=text[:20]):
            started = time.monotonic()
            with pytest.raises(ConfigurationError, match=f"(?s){message}"):
                read_settings(text)
            assert time.monotonic() - started < 3


def test_the_largest_text_is_read_in_bearable_time():
    lines = "".join(f"key_{number}: 1\n" for number in range(7_000))
    started = time.monotonic()
    brought = read_settings("micro_batch_size: 3\n" + lines)
    assert len(brought.left_out) == 7_000
    assert brought.recipe.effective_batch_size == 3
    assert time.monotonic() - started < 5


def test_the_table_names_what_there_is():
    """A misspelt setting of ours would be an error of the program on a user's file."""
    ours = {field.name for field in fields(Recipe)}
    for program in FOREIGN["program"]:
        theirs = {
            key for rule in program["rule"] for key in (*rule.get("when", {}), *chain(*rule.get("set", {}).values()))
        }
        for rule in program["rule"]:
            assert set(rule) <= {"when", "set", "fixed", "says", "technique"}
            given = {**rule.get("set", {}), **rule.get("fixed", {})}
            assert given.keys() <= (
                ours if "technique" not in rule else REGISTRY[rule["technique"]]().settings().keys()
            )
            assert given or rule.get("technique") or rule["says"]
        assert set(program["defaults"]) <= theirs
    for word, translations in FOREIGN["words"].items():
        assert word in {
            name for program in FOREIGN["program"] for rule in program["rule"] for name in rule.get("set", {})
        }
        assert all(isinstance(text, str) for text in translations.values())


def test_what_no_control_shows_is_told():
    found = read_settings('callbacks = ["transformers:EarlyStoppingCallback"]\n[arguments]\nweight_decay = 0.1\n')
    assert found.understood == [
        ("arguments.weight_decay", "0.1"),
        ("callbacks", "transformers:EarlyStoppingCallback, whose code a run imports"),
    ]


def test_checkpoints_that_wait_on_the_host_are_brought_along(tmp_path):
    from transformers import TrainingArguments

    kwargs = {"every_n_layers": 2, "offload": True}
    arguments = TrainingArguments(str(tmp_path), activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    brought = read_settings(arguments.to_json_string())
    assert brought.recipe.techniques == (GradientCheckpointing(every_n_layers=2, offload=True),)
