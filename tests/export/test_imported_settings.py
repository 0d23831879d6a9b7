"""Settings that people have: which class reads them, what becomes of each field, and what is rejected.

The texts are made after public ones, in our own words; the addresses are those of the originals.
"""

import json
import time
import tomllib
from dataclasses import replace

import pytest

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.export import classes
from workbench.export.classes import ADAPTERS, HARMLESS, NOT_COVERED, PACKAGES, PASSED, READ, defaults_of, tables_of
from workbench.export.pasted import LIMIT
from workbench.export.settings import RENAMED, read_settings, read_settings_file
from workbench.journal.record import Status
from workbench.recipe import DECIDED, Recipe, as_toml
from workbench.techniques import (
    ActivationOffloading,
    Attention,
    ChunkedCrossEntropy,
    DataLoading,
    Dora,
    GradientAccumulation,
    GradientCheckpointing,
    Ia3,
    Lora,
    MixedPrecision,
    Optimizer,
    PrefixTuning,
    PromptTuning,
    PureBf16,
    Qlora,
)
from workbench.training.run import run

SFT_FILE = """
# trl sft --config gpt2.yaml
model_name_or_path: openai-community/gpt2-large
model_revision: refs/pr/3
dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: someone/chats
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
max_length: 500
pad_to_multiple_of: 64
packing: true
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [c_attn, c_proj]
lora_modules_to_save: [lm_head]
optim: paged_adamw_8bit
eval_strategy: steps
eval_steps: 10
per_device_eval_batch_size: 16
weight_decay: 0.1
accelerate_config: zero2
env:
  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True
"""
CALLS = """
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
peft_config = peft.LoraConfig(r=32, lora_alpha=16, bias="none", task_type=TaskType.CAUSAL_LM, use_rslora=True,
    target_modules=["c_attn", "c_fc"], init_lora_weights="gaussian", layers_to_transform=[0, 1])
args: TrainingArguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=4, optim="adafactor", fp16=True,
    label_smoothing_factor=0.1, gradient_checkpointing=True, save_steps=-1,
    gradient_checkpointing_kwargs={"use_reentrant": True, "determinism_check": "none"},
)
"""


def of(text):
    return read_settings(text).recipe


def names(pairs):
    return [name for setting, _ in pairs for name in [setting.partition(":")[0]]]


def test_a_file_of_trl():
    imported = read_settings(SFT_FILE, Recipe(corpus="mine.txt", steps=7) | Lora(rank=1))
    assert imported.classes.startswith("SFTConfig (trl ")
    assert "DatasetMixtureConfig" not in imported.classes
    assert imported.recipe == Recipe(
        model="openai-community/gpt2-large@refs/pr/3", corpus="mine.txt", effective_batch_size=8, sequence_length=512,
        steps=7, learning_rate=2e-4, seed=42, evaluation_batch_size=16, arguments={"weight_decay": 0.1},
        techniques=(
            Lora(rank=32, alpha=16, dropout=0.05, targets="c_attn+c_proj"), PureBf16(), GradientAccumulation(steps=4),
            GradientCheckpointing(), ChunkedCrossEntropy(), Optimizer(kind="adamw_8bit_paged"),
        ),
    )  # fmt: skip
    assert names(imported.not_covered) == ["accelerate_config", "env", "lora_modules_to_save"]
    assert {*names(imported.harmless)} == {"dataset_name", "packing", "eval_steps"}
    assert imported.without.startswith("without what these 3 settings do: ")
    assert "NOT COVERED: lora_modules_to_save" in str(imported)


def test_calls():
    imported = read_settings(CALLS, Recipe(model="gpt2"))
    assert imported.recipe == Recipe(
        model="gpt2", effective_batch_size=16, seed=42, learning_rate=5e-5,
        arguments={"label_smoothing_factor": 0.1},
        techniques=(
            Qlora(rank=32, targets="c_attn+c_fc", double_quantization=False, compute="bfloat16"),
            MixedPrecision(dtype="fp16"), GradientAccumulation(steps=4), GradientCheckpointing(use_reentrant=True),
            Optimizer(kind="adafactor"),
        ),
    )  # fmt: skip
    assert names(imported.not_covered) == ["layers_to_transform", "gradient_checkpointing_kwargs"]


def test_training_arguments_as_transformers_writes_them(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=50,
        activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2, "offload": True},
        optim="sgd", optim_args="momentum=0.9", use_cpu=True, seed=9, bf16=True,
    )  # fmt: skip
    imported = read_settings(arguments.to_json_string())
    assert imported.recipe == Recipe(
        effective_batch_size=12, steps=50, seed=9, learning_rate=5e-5,
        techniques=(
            GradientAccumulation(steps=3), GradientCheckpointing(every_n_layers=2, offload=True), MixedPrecision(),
            Optimizer(kind="sgd_momentum"),
        ),
    )  # fmt: skip
    assert not imported.not_covered


def test_what_no_setting_says_of_the_weights_is_assumed_and_said():
    for text, is_assumed in (
        ("TrainingArguments(bf16=True)", True),
        ("SFTConfig()", True),
        ("LoraConfig()", True),
        ("SFTConfig(model_init_kwargs={'dtype': 'bfloat16'})", False),
        ("max_length: 8", False),  # ModelConfig has a type of its own
    ):
        imported = read_settings(text)
        assert ("weights in fp32" in str(imported)) is bool(imported.assumed) is is_assumed


def test_no_secret_is_shown_again():
    for text in ("TrainingArguments(hub_token='hf_secret')", "max_length: 8\nenv:\n  HF_TOKEN: hf_secret\n"):
        imported = read_settings(text)
        assert "hf_secret" not in f"{imported} {imported!r}"
        assert imported.harmless or imported.not_covered


def test_no_device_is_looked_at(monkeypatch):
    from accelerate.state import PartialState
    from transformers import TrainingArguments

    monkeypatch.setattr(PartialState, "_shared_state", {})
    assert of('{"per_device_train_batch_size": 3, "bf16": true, "tf32": true}').effective_batch_size == 3
    assert not PartialState._shared_state
    assert isinstance(vars(TrainingArguments)["device"], property)


def test_a_class_whose_package_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(classes, "find_spec", lambda name: name != "trl")
    classes.find_class.cache_clear()
    classes.defaults_of.cache_clear()
    with pytest.raises(UnavailableError, match="SFTConfig is a class of trl. Install it: pip install -U trl"):
        read_settings("SFTConfig()")
    classes.find_class.cache_clear()
    classes.defaults_of.cache_clear()


RECIPE = Recipe(
    model='a "gpt2"', corpus="ein Tëxt\x7f\\\t😀.txt", learning_rate=1e-5, dropout=0.0, seed=2**32 - 1,
    techniques=(Lora(rank=3, alpha=0.5), GradientCheckpointing(use_reentrant=True), PureBf16()),
)  # fmt: skip


def test_our_own_files_come_back_as_they_went(tmp_path, subtests):
    for recipe in (Recipe(), RECIPE):
        with subtests.test(recipe=recipe):
            plain = recipe.to_dict()
            assert Recipe.from_dict(tomllib.loads(as_toml(recipe))) == recipe
            for text in (as_toml(recipe), json.dumps(plain), "\ufeff" + json.dumps(plain, indent=1)):
                assert of(text) == recipe
            assert of(json.dumps({"id": "x", "status": "ok", "recipe": plain})) == recipe  # a record
            (tmp_path / "r.toml").write_text(as_toml(recipe), encoding="utf-8")
            assert read_settings_file(tmp_path / "r.toml").recipe == recipe


TOGETHER = [
    ("peft.LoraConfig(r=4, lora_alpha=8, task_type=TaskType.CAUSAL_LM)", [Lora(4, 8, 0.0)]),
    ("IA3Config()", [Ia3()]),
    ("PrefixTuningConfig(num_virtual_tokens=4)", [PrefixTuning(4)]),
    ("PromptTuningConfig(num_virtual_tokens=4, task_type='CAUSAL_LM')", [PromptTuning(4)]),
    ("LoraConfig(use_dora=True)", [Dora(8, 8, 0.0)]),
    ('{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["c_attn"]}', [Lora(16, 32, 0.0, "c_attn")]),
    ('{"peft_type": "IA3", "inference_mode": true}', [Ia3()]),
    ('{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}', [PromptTuning(3)]),
    ('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": null}', [Lora(4, 8, 0.0)]),
    ('{"optim": "adamw_torch", "output_dir": "x", "fp16": true}', [Optimizer("adamw_foreach"), MixedPrecision("fp16")]),
    ('{"dataloader_num_workers": 4, "output_dir": "x"}', [DataLoading(memory_mapped=False, num_workers=4)]),
    ('optim = "sgd"\nmax_steps = 5\n', [Optimizer("sgd")]),
    # github.com/AIAnytime/distillanything and others leave the precision to TRL, whose default is bf16.
    ("max_length: 8", [MixedPrecision(), GradientCheckpointing(), ChunkedCrossEntropy()]),
    (
        "max_length: 8\nfp16: true\ngradient_checkpointing: false\nlabel_smoothing_factor: 0.1\n"
        "activation_offloading: true\nattn_implementation: eager",
        [MixedPrecision("fp16"), ActivationOffloading(), Attention()],
    ),
    (
        "use_peft: true\nload_in_4bit: true\ndtype: bfloat16\nlora_r: 4\nlora_alpha: 8\nuse_bnb_nested_quant: true\n"
        "gradient_checkpointing: false\nlora_target_modules: all-linear\nlora_dropout: 0",
        [Qlora(4, 8, 0.0, "all-linear", compute="bfloat16"), PureBf16(), ChunkedCrossEntropy()],
    ),
    (
        "SFTConfig(activation_checkpointing=False, model_init_kwargs={'dtype': 'bfloat16',\n"
        "'attn_implementation': 'eager'})",
        [PureBf16(), Attention(), ChunkedCrossEntropy()],
    ),
]


def test_what_acts_together_is_read_together(subtests):
    for text, techniques in TOGETHER:
        with subtests.test(text=text):
            imported = read_settings(text)
            assert str(imported)
            assert imported.recipe.techniques == Recipe(techniques=tuple(techniques)).techniques
            assert not imported.without


def test_an_optimizer_that_has_no_technique_goes_to_the_trainer():
    recipe = of("TrainingArguments('x', optim='lion_32bit', optim_args='beta2=0.9')")
    assert recipe.arguments == {"optim": "lion_32bit", "optim_args": "beta2=0.9"}
    assert not recipe.techniques


LACKING = [
    ('{"peft_type": "LORA", "r": 8, "target_modules": "^(?!.*visual).*q$", "bias": "all"}', "target_modules, bias"),
    ('{"peft_type": "LORA", "r": 8, "field_of_tomorrow": 3}', "field_of_tomorrow"),
    ("LoraConfig(init_lora_weights='pissa')", "init_lora_weights"),
    ("BitsAndBytesConfig(load_in_4bit=True)", "load_in_4bit"),
    ('{"load_in_8bit": true, "quant_method": "bitsandbytes"}', "load_in_8bit"),
    ("b = BitsAndBytesConfig(load_in_4bit=True)\na = LoraConfig(use_dora=True)", "use_dora"),
    ("b = BitsAndBytesConfig(load_in_4bit=True)\na = IA3Config()", "load_in_4bit"),
    ("model_name_or_path: x\nuse_peft: true\nload_in_8bit: true", "load_in_8bit"),
    ("model_name_or_path: x\nload_in_4bit: true\nmax_length: 8", "load_in_4bit"),
    ("dtype: auto\nmodel_name_or_path: x", "dtype"),
    ("dtype: bfloat16\nmodel_name_or_path: x\nfp16: true", "fp16"),
    ("max_length:\nmodel_name_or_path: x", "max_length"),
    ("max_length: 8\nloss_type: dft", "loss_type"),
    ("SFTConfig(model_init_kwargs={'rope_scaling': 1})", "model_init_kwargs"),
    ('{"fsdp": "full_shard", "torch_compile": true, "output_dir": "x"}', "torch_compile, fsdp"),
    ('{"deepspeed": "no such file", "tf32": true, "use_liger_kernel": true}', "tf32, use_liger_kernel, deepspeed"),
    ('{"optim": "adamw_torch_fused", "optim_args": "a=1"}', "optim_args"),
    ('{"peft_type": "LORA", "task_type": "SEQ_CLS"}', "task_type"),
    ("LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, target_modules=[])", "task_type, target_modules"),
    ("model_name_or_path: x\nuse_peft: true\nlora_task_type: SEQ_CLS", "lora_task_type"),
]


def test_a_headline_names_what_is_not_covered(subtests):
    for text, listed in LACKING:
        with subtests.test(text=text):
            assert read_settings(text).without.endswith(f": {listed}")


REJECTED = [
    ("args = TrainingArguments('x')\nargs.seed = 3", "Line 2, 'args.seed = 3'.*plan --gpu t4 -- python train.py"),
    ("TrainingArguments(**cfg)", r"\*\*cfg is not a plain value"),
    ("TrainingArguments(output_dir=args.out)", "args.out is not a plain value"),
    ("TrainingArguments(bf16=torch.cuda.is_bf16_supported())", "is_bf16_supported.. is not a plain value"),
    ("x = 4\nTrainingArguments(per_device_train_batch_size=x)", "Line 1, 'x = 4'"),
    ("from peft import LoraConfig\nLoraConfig()", "Line 1, 'from peft import LoraConfig'"),
    ("for size in (1, 2):\n    TrainingArguments(per_device_train_batch_size=size)", "Line 1, 'for size"),
    ("a = b = LoraConfig()", "Line 1"),
    ("a, b = LoraConfig(), 1", "Line 1"),
    ("model = AutoModelForSequenceClassification.from_pretrained('x')", "Classification.from_pretrained is not"),
    ("model.half()\nTrainingArguments()", "model.half is not a class of settings that is read"),
    ("PeftModel.from_pretrained(base, 'me/adapter')", "PeftModel.from_pretrained is not a class"),
    ("a = TrainingArguments(", "Line 1.*not complete Python"),
    ("a = TrainingArguments()\nb = TrainingArguments()", "TrainingArguments and TrainingArguments cannot both count"),
    ("a = TrainingArguments()\nb = SFTConfig()", "TrainingArguments and SFTConfig cannot both"),
    ("a = LoraConfig()\nb = IA3Config()", "LoraConfig and IA3Config cannot both count"),
    ("a = GPT2Config(n_layer=2)", "GPT2Config is not a class of settings"),
    ("a = VeraConfig(r=4)", "VeraConfig is not a class of settings"),
    ("args = DPOConfig(beta=0.1)", "a trainer of preferences"),
    ("model, _ = FastLanguageModel.from_pretrained('x', load_in_4bit=True)", "settings of Unsloth"),
    # github.com/karpathy/nanoGPT config/train_shakespeare_char.py
    ("out_dir = 'out'\nn_layer = 6 # baby\ncompile = False", "Line 1, \"out_dir = 'out'\""),
    ("TrainingArguments(evaluation_strategy='no')", "no argument 'evaluation_strategy'. It is eval_strategy since"),
    # github.com/zhouyu5/alpaca-lora scripts/train.sh
    ("python finetune.py --base_model x --micro_batch_size 4", "workbench plan --gpu t4 -- python finetune.py --base"),
    ("accelerate launch --mixed_precision bf16 train.py", "emulate --gpu t4 -- accelerate launch --mixed_prec"),
    ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train --stage sft", "emulate --gpu t4 -- llamafactory-cli train --stage"),
    ("stage: sft\ncutoff_len: 8\ntemplate: x\ngradient_checkpointing: false", "LLaMA-Factory.*llamafactory-cli train"),
    ("model_name_or_path: x\npacking: true\nfinetuning_type: lora", "settings of LLaMA-Factory"),
    ("base_model: x\nadapter: lora\noptim_args:\n  a: 1", "settings of axolotl.*axolotl train"),
    ("checkpoint_dir: x\nlora_query: true\ntrain:\n  global_batch_size: 1", "settings of litgpt"),
    ("model:\n  _component_: torchtune.models.llama2\nbatch_size: 2", "settings of torchtune"),
    ("max_duration: 1ep\nglobal_train_batch_size: 8", "settings of Composer"),
    ("compute_environment: LOCAL_MACHINE\nnum_processes: 4\nmixed_precision: 'no'", "settings of accelerate"),
    ('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}', "settings of DeepSpeed"),
    ("beta: 0.1\nloss_type: sigmoid\nmodel_name_or_path: x", "a trainer of preferences"),
    ("beta: 0.1\nmax_length: 8\nmodel_name_or_path: x", "do not have 'beta'"),
    ("set -x\nexport A=1\nFOO=1 /opt/bin/torchrun --nproc 2 \\\n  train.py --a 1", "t4 -- torchrun --nproc 2 train.py"),
    ("#!/bin/bash\nif [ 1 ]; then\n  import_it\nfi\npython run.py --x 1", "plan --gpu t4 -- python run.py --x"),
    ("self.cfg = LoraConfig(r=8)", "paste the call alone, or assigned to one name"),
    ("configs.TrainingArguments()", "configs.TrainingArguments is not a class"),
    ("r: 8\nlora_alpha: 16", "add peft_type: LORA"),
    ("fine_tune_type: lora\nmodel: x\niters: 5\nnum_layers: 4", "settings of mlx-lm"),
    ('{"best_metric": null, "train_batch_size": 2}', "do not have 'best_metric', 'train_batch_size'"),
    ("num_generations: 8\nmax_completion_length: 8", "a trainer of preferences"),
    ('{"model_name_or_path": "x", "block_size": 8}', "a script made after transformers' examples"),
    ("output_dir: x\nlogging_steps:", "These have none: logging_steps"),
    ('{"cells": [], "nbformat": 4}', "settings of a notebook"),
    ("model_name_or_path: x\ndataset_name: y\nlearning_rate: 1e-4", "may be of `trl sft` or of a script of yours"),
    # github.com/huggingface/peft method_comparison/MetaMathQA/default_training_params.json
    ('{"model_id": "x", "dtype": "bfloat16", "batch_size": 4, "lr_scheduler": "cosine"}', "do not have 'model_id', 'b"),
    ("evaluation_strategy: steps\noutput_dir: x", "evaluation_strategy is eval_strategy since transformers 4.41"),
    ("max_seq_length: 8\npacking: true", "max_seq_length is max_length since TRL"),
    ('{"peft_type": "VERA", "r": 256}', "does not have PEFT's adapter 'VERA'"),
    ('{"peft_type": "PREFIX_TUNING"}', "needs num_virtual_tokens"),
]  # fmt: skip
UNUSABLE = [
    ("", "settings need names"),
    ("- a\n- b", "got .'a', 'b'."),
    ("[1, 2]", "settings need names"),
    ("just words", "settings need names"),
    ('{"steps": ', "cannot be read as JSON"),
    ("steps = \n", "cannot be read as TOML"),
    ("a: b: c", "cannot be read as YAML"),
    ("{}", "do not have anything"),
    ("colour: <b>red</b>", "do not have 'colour'"),
    ("lora_r: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ("a: &a [x]\nlora_r: [*a, *a]", "has aliases"),
    ("x" * (LIMIT + 1), "may have 100,000 characters"),
    ("lora_r: 1\n" * LIMIT, "may have 100,000 characters"),
    ('{"recipe":' * 10_000, "cannot be read as JSON"),
    ("[" * 20_000, "cannot be read as YAML"),
    ("max_length: 1\nmax_length: 8", "max_length is there twice"),
    ('{"seed": 1, "seed": 2}', "seed is there twice"),
    ("TrainingArguments(seed=1, seed=2)", "seed is there twice"),
    ("per_device_train_batch_size: 0", "effective_batch_size must be"),
    ("per_device_train_batch_size: [1, 2]", "must be integers, got"),
    ("max_length: -5", "sequence_length must be"),
    ("learning_rate: .nan", "learning_rate must be a number"),
    ("max_length: 8\nuse_peft: true\nlora_r: -1", "rank must be"),
    ("per_device_train_batch_size: two\noutput_dir: x", "TrainingArguments .* rejects these settings .*'two'"),
    ('{"per_device_train_batch_size": "auto", "output_dir": "x"}', "rejects these settings .*'auto'"),
    ('{"lr_scheduler_type": "cosin", "output_dir": "x"}', "cosin is not a valid SchedulerType"),
    ("TrainingArguments(max_steps='5')", "these settings cannot be used"),
    ("TrainingArguments(gradient_accumulation_steps='4')", "these settings cannot be used"),
    ("LoraConfig(target_modules=[1, 2])", "these settings cannot be used .*expected str"),
    ("SFTConfig(model_init_kwargs='x')", "these settings cannot be used"),
    ("SFTConfig(max_length='abc')", "these settings cannot be used .*'abc'"),
    ("TrainingArguments(bf16=True, fp16=True)", "rejects these settings .At most one of fp16 and bf16"),
    ("TrainingArguments(eval_strategy='steps', eval_steps='x')", "rejects these settings"),
    ('{"steps": 5, "stepz": 6}', "recipe has no field 'stepz'.*Did you mean steps"),
    ('{"techniques": {"lroa": {}}}', "Did you mean lora"),
    ("[techniques.lora]\nrank = 0", "lora: rank must be an integer of at least 1"),
]


def test_what_cannot_be_used_is_said_at_once(subtests):
    of("seed: 1")  # which imports transformers
    of("max_length: 8")
    for text, message in [*REJECTED, *UNUSABLE]:
        with subtests.test(text=text[:60]):
            started = time.process_time()
            with pytest.raises((ConfigurationError, UnavailableError), match=f"(?s){message}"):
                read_settings(text)
            assert time.process_time() - started < 3


def test_every_field_of_every_class_has_one_answer(subtests):
    """A release with a new field fails here, and somebody decides what the field means."""
    for name in PACKAGES:
        with subtests.test(name=name):
            answers = []
            for part in tables_of(name):
                for table in (READ, PASSED):
                    answers += table.get(part, "").split()
                for table in (HARMLESS, NOT_COVERED):
                    answers += " ".join(table.get(part, {}).values()).split()
            assert sorted(answers) == sorted(defaults_of(name))
    for name, (successor, _) in RENAMED.items():
        known = {field for class_name in PACKAGES for field in defaults_of(class_name)}
        assert successor in known
        assert name not in known or name.startswith("gradient_checkpointing")
    assert {*ADAPTERS.values()} <= PACKAGES.keys()


def test_a_recipe_takes_what_is_passed_to_it():
    decided = {pattern.partition("=")[0].rstrip("*") for patterns in DECIDED for pattern in patterns.split()}
    for name in PASSED["TrainingArguments"].split():
        assert not [pattern for pattern in decided if name == pattern]
    stated = {"weight_decay": 0.1, "warmup_steps": 0.03, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    assert of(json.dumps(stated)).arguments == stated


def test_what_no_control_shows_is_told():
    found = read_settings('callbacks = ["transformers:EarlyStoppingCallback"]\n[arguments]\nweight_decay = 0.1\n')
    assert found.read == [
        "weight_decay: 0.1",
        "callbacks: transformers:EarlyStoppingCallback, whose code a run imports",
    ]


# ---- what is called harmless ----

STATED = {
    "logging_steps": 5, "logging_first_step": True, "log_level": "warning", "run_name": "mine",
    "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 1, "metric_for_best_model": "loss",
    "greater_is_better": False, "label_names": ["labels"], "remove_unused_columns": False, "ignore_data_skip": True,
}  # fmt: skip


def test_what_is_called_harmless_changes_no_byte_of_the_peak(recipe, fine_tuned):
    imported = read_settings(json.dumps(STATED))
    assert {*names(imported.harmless)} == STATED.keys() - {"eval_strategy"}  # which decides the evaluation's batch
    record = run(replace(recipe, arguments=STATED), device="cpu")
    plain = fine_tuned(recipe)
    assert record.status is Status.OK
    assert record.peak_allocated_bytes == plain.peak_allocated_bytes
    assert record.by_category == plain.by_category
