"""Recipes out of other people's files: whose they are, what becomes of each setting, and what is refused.

The files are made after public ones, in our own words; the addresses are those of the originals.
"""

import json
import time
import tomllib
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import chain

import pytest

from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.export import owners
from workbench.export.bring import read_settings
from workbench.export.pasted import LIMIT
from workbench.export.whose import FOREIGN, PROGRAMS
from workbench.journal.record import Status
from workbench.recipe import Recipe, as_toml
from workbench.techniques import (
    REGISTRY,
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
    PureBf16,
    Qlora,
)
from workbench.training.run import run

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
# github.com/Dhawgupta/quantifying_exposure_bias train_gpt2_xl.sh
RUN_CLM = """
 python run_clm.py     \\
    --model_name_or_path gpt2-xl --dataset_name wikitext \\
    --per_device_train_batch_size 6 \\
    --per_device_eval_batch_size 12 --fp16 --save_steps 2000 --do_train --do_eval --block_size 256 \\
    --output_dir ./models/xl/ --overwrite_output_dir \\
"""
# github.com/tathagatoroy/Controllable_Summarization_Experiments llama3/test_hf_fsdp_qlora.py
SCRIPT = """
!pip install -q trl
model_id = "meta-llama/Meta-Llama-3-8B"
length = 512
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("another")
model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=bnb, torch_dtype=torch.bfloat16)
peft_config = LoraConfig(lora_alpha=16, r=32, bias="none", task_type="CAUSAL_LM", target_modules="all-linear",
    modules_to_save=["lm_head", "embed_tokens"])
args = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=4, optim="paged_adamw_8bit",
    evaluation_strategy="steps", per_device_eval_batch_size=16, bf16=torch.cuda.is_bf16_supported(),
    group_by_length=True, warmup_ratio=0.03, label_smoothing_factor=0.1, gradient_checkpointing=True,
)
raise SystemExit("a script is never run")
"""
# github.com/lun2hang/playgemma_textcls_sft gemma2b_sft_chat.sh
TRL = """
accelerate launch --config_file one.yaml --num_processes=1 examples/scripts/sft.py --model_name /models/gemma-2b \\
  --per_device_train_batch_size 2 --learning_rate 2e-4 --save_steps 20_000 --use_peft --lora_r 16 \\
  --lora_target_modules q_proj v_proj --load_in_4bit --output_dir out
"""


def of(text):
    return read_settings(text).recipe


def test_axolotl():
    brought = read_settings(AXOLOTL, Recipe(corpus="mine.txt", steps=7) | Lora(rank=1))
    assert brought.program.startswith("axolotl")
    assert brought.recipe == Recipe(
        model="openai-community/gpt2-large", corpus="mine.txt", effective_batch_size=8, sequence_length=512, steps=7,
        learning_rate=2e-4, arguments={"lr_scheduler_type": "cosine"},
        techniques=(
            Qlora(rank=32, alpha=16, dropout=0.05, targets="all-linear", compute="bfloat16"), PureBf16(),
            GradientAccumulation(steps=4), GradientCheckpointing(), Optimizer(kind="adamw_8bit_paged"),
        ),
    )  # fmt: skip
    assert [theirs for theirs, _ in brought.not_understood] == ["deepspeed: zero2.json"]
    assert brought.without == "without what this setting does: deepspeed"
    assert {"num_epochs: 3", "wandb_project: mine"} < {theirs for theirs, _ in brought.harmless}


def test_llama_factory():
    brought = read_settings(FACTORY, Recipe(model="gpt2-tiny"))
    assert brought.program.startswith("LLaMA-Factory")
    assert brought.recipe == Recipe(
        model="Qwen/Qwen3-4B", effective_batch_size=8, sequence_length=256, steps=100, learning_rate=1e-4, seed=42,
        techniques=(
            Lora(rank=16, alpha=32, targets="down_proj+q_proj+v_proj"), PureBf16(), GradientAccumulation(steps=8),
            GradientCheckpointing(use_reentrant=True), ChunkedCrossEntropy(),
        ),
    )  # fmt: skip
    assert brought.without == "without what these 2 settings do: quantization_bit, enable_liger_kernel"


def test_a_command_line_is_read_by_the_trainers_own_fields():
    brought = read_settings(RUN_CLM)
    assert brought.recipe == Recipe(
        model="gpt2-xl", effective_batch_size=6, sequence_length=256, evaluation_batch_size=12, seed=42,
        learning_rate=5e-5, techniques=(MixedPrecision(dtype="fp16"),),
    )  # fmt: skip
    assert not brought.without
    assert "overwrite_output_dir: true" in dict(brought.harmless)


def test_a_script_is_read_and_not_run():
    brought = read_settings(SCRIPT)
    assert brought.recipe == Recipe(
        model="meta-llama/Meta-Llama-3-8B", effective_batch_size=16, seed=42, learning_rate=5e-5,
        evaluation_batch_size=16,
        techniques=(
            Qlora(rank=32, targets="all-linear", double_quantization=False, compute="bfloat16"), PureBf16(),
            GradientAccumulation(steps=4), GradientCheckpointing(), Optimizer(kind="adamw_8bit_paged"),
        ),
        arguments={
            "train_sampling_strategy": "group_by_length", "warmup_steps": 0.03, "label_smoothing_factor": 0.1,
        },
    )  # fmt: skip
    assert brought.without == "without what these 2 settings do: modules_to_save, bf16"
    assert "warmup_ratio (warmup_steps since transformers 5.0): 0.03" in dict(brought.understood)


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trls_own_fields_and_defaults_are_taken():
    brought = read_settings(TRL)
    assert brought.recipe == Recipe(
        model="/models/gemma-2b", effective_batch_size=2, sequence_length=1024, learning_rate=2e-4, seed=42,
        techniques=(
            Qlora(rank=16, alpha=32, dropout=0.05, targets="q_proj+v_proj", double_quantization=False),
            MixedPrecision(), GradientCheckpointing(), ChunkedCrossEntropy(),
        ),
    )  # fmt: skip
    assert not brought.without
    plain = of('{"per_device_train_batch_size": 2, "bf16": true, "packing": false, "max_length": 512}')
    assert plain.sequence_length == 512
    assert not {"lora", "pure_bf16"} & {technique.name for technique in plain.techniques}


def test_where_trl_is_missing_its_files_say_so(monkeypatch):
    monkeypatch.setattr(owners, "find_spec", lambda name: name != "trl")
    owners.owner.cache_clear()
    with pytest.raises(UnavailableError, match="of trl's .*Config. Install it: pip install trl"):
        read_settings('{"max_length": 512, "assistant_only_loss": true}')
    owners.owner.cache_clear()


def test_training_arguments_as_transformers_writes_them(tmp_path):
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=3, max_steps=50,
        activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2, "offload": True},
        optim="sgd", optim_args="momentum=0.9", use_cpu=True, seed=9, bf16=True,
    )  # fmt: skip
    brought = read_settings(arguments.to_json_string())
    assert brought.recipe == Recipe(
        effective_batch_size=12, steps=50, seed=9, learning_rate=5e-5,
        techniques=(
            GradientAccumulation(steps=3), GradientCheckpointing(every_n_layers=2, offload=True), MixedPrecision(),
            Optimizer(kind="sgd_momentum"),
        ),
    )  # fmt: skip
    assert not [theirs for theirs, why in brought.not_understood if "not known" in why]


def test_no_class_of_settings_is_made_here(monkeypatch):
    from transformers import TrainingArguments

    def made(self, *args, **kwargs):
        raise AssertionError("it looks at the device, and changes what accelerate knows")

    monkeypatch.setattr(TrainingArguments, "__init__", made)
    assert of('{"per_device_train_batch_size": 3, "bf16": true, "tf32": true}').effective_batch_size == 3


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


OFF = "disable_gradient_checkpointing: true"
TOGETHER = [
    ("peft.LoraConfig(r=4, lora_alpha=8, task_type=TaskType.CAUSAL_LM)", [Lora(4, 8, 0.0)]),
    ("IA3Config()", [Ia3()]),  # the class alone says which adapter it is
    ("PrefixTuningConfig(num_virtual_tokens=4)", [PrefixTuning(4)]),
    ("micro_batch_size: 1\nadapter: lora\npeft_use_dora: true\nbf16: false", [Dora()]),
    ("micro_batch_size: 1\nadapter:\nbf16: true", [PureBf16()]),
    ("micro_batch_size: 1\nbf16: false\nload_in_8bit: true\neager_attention: yes", [Attention()]),
    (
        "sequence_len: 8\nbf16: no\ngradient_checkpointing: offload_disk",
        [GradientCheckpointing(use_reentrant=True), ActivationOffloading(to="disk")],
    ),
    ("sequence_len: 8\nbf16: no\ncut_cross_entropy: true", [ChunkedCrossEntropy()]),
    (
        f"finetuning_type: full\nbf16: true\n{OFF}\noptim: adafactor\ncutoff_len: 8",
        [MixedPrecision(), Optimizer(kind="adafactor")],
    ),
    (f"cutoff_len: 8\nfinetuning_type: full\npure_bf16: true\n{OFF}", [PureBf16()]),
    (
        f"cutoff_len: 8\nlora_target: all\nquantization_bit: 4\ndouble_quantization: no\nflash_attn: disabled\n{OFF}",
        [Qlora(targets="all-linear", double_quantization=False), Attention()],
    ),
    ('{"peft_type": "LORA", "r": 16, "lora_alpha": 32, "target_modules": ["c_attn"]}', [Lora(16, 32, 0.0, "c_attn")]),
    ('{"peft_type": "IA3", "inference_mode": true}', [Ia3()]),
    ('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}', [MixedPrecision()]),
    ("mixed_precision: fp16\nnum_processes: 1\ndistributed_type: 'NO'", [MixedPrecision(dtype="fp16")]),
    ('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "task_type": null}', [Lora(4, 8, 0.0)]),
    # github.com/yangjianxin1/Firefly train_args/sft/full/qwen-7b-sft-full.json
    ('{"optim": "adamw_hf", "output_dir": "x", "train_file": "y"}', [Optimizer(kind="adamw_foreach")]),
    # github.com/AounAbdullah/qwen3-vl-finetune configs/qlora_7b.yaml
    (
        "dataset_text_field: text\nuse_peft: true\nload_in_4bit: true\nbnb_4bit_compute_dtype: bfloat16\nlora_r: 4\n"
        "lora_alpha: 8\nloss_type: chunked_nll\nbf16: false\ngradient_checkpointing: false",
        [Qlora(rank=4, alpha=8, dropout=0.05, double_quantization=False)],
    ),
    # github.com/AIAnytime/distillanything recipes/mac-lora.yaml
    (
        "# started with accelerate launch train.py --config one.yaml\nadapter: lora\nbf16: false\nlora_r: 4 # --r",
        [Lora(4)],
    ),
    # github.com/OptimalScale/LMFlow scripts/run_finetune.sh, github.com/shibing624/MedicalGPT scripts/run_grpo.sh
    (
        "python run_clm.py `# our batch` --block_size 8 \\\n --seed 3 > >(tee a.log) 2> >(tee b.log >&2)",
        [],
    ),
    ('{"dataloader_num_workers": 4, "output_dir": "x"}', [DataLoading(memory_mapped=False, num_workers=4)]),
]


def test_what_acts_together_is_read_together(subtests):
    for text, techniques in TOGETHER:
        with subtests.test(text=text):
            assert of(text).techniques == Recipe(techniques=tuple(techniques)).techniques


LACKING = [
    ('{"peft_type": "LORA", "r": 8, "target_modules": "^(?!.*visual).*q$", "bias": "all"}', "target_modules, bias"),
    ("base_model: a/b\nbf16: true\nmicro_batch_size: 1", "embeddings"),
    ("base_model: a/b-GPTQ\nadapter: lora\ngptq: true\nmicro_batch_size: 1", "gptq"),
    ("base_model: a/b\nadapter: lora\nload_in_8bit: true\nmicro_batch_size: 1\ntf32: true", "load_in_8bit, tf32"),
    # github.com/HenryCai11/LLM-Self-Control self_control/prefix_control/configs/deepspeed.py
    (
        '{"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, "train_batch_size": "auto"}',
        "fp16, zero",
    ),
    ("compute_environment: LOCAL_MACHINE\nnum_processes: 4\nmixed_precision: 'no'", "num_processes"),
    ('{"fsdp": "full_shard", "torch_compile": true, "output_dir": "x"}', "torch_compile, fsdp"),
    ("TrainingArguments(per_device_train_batch_size=args.batch, output_dir=args.out)", "per_device_train_batch_size"),
    # github.com/okeeper/LLaMA-Factory qwen/train.sh
    ("llamafactory-cli train --stage sft --model_name_or_path ${MODEL} --cutoff_len 64", "model_name_or_path"),
]


def test_a_headline_says_what_it_is_without(subtests):
    for text, names in LACKING:
        with subtests.test(text=text):
            assert f": {names}" in read_settings(text).without


REFUSED = [
    # github.com/zhouyu5/alpaca-lora scripts/train.sh
    ("python finetune.py --base_model x --micro_batch_size 4 --num_epochs 1 --cutoff_len=512 --data_path y --lora_r=16",
     "not clear whose settings these are: axolotl .*base_model.*, or "),
    ("lora_alpha: 16", "not clear whose settings .*lora_alpha"),
    ("micro_batch_size: 3\n" + "".join(f"key_{number}: 1\n" for number in range(7_000)), "not clear whose settings"),
    # github.com/bigohofone/assignment1-basics-solution cs336_basics/scripts/ts_train_model.sh
    ("deepspeed --num_gpus=8 ./train.py --lr 6e-4 --context_length 256", "not clear whose"),
    # github.com/ryanyxw/phdbrainstorm train.sh
    ("litgpt pretrain pythia-14m --tokenizer_dir x --data TextFiles --optimizer AdamW --out_dir y", "of litgpt"),
    ("checkpoint_dir: x\nlora_query: true\nlora_r: 8\ntrain:\n  micro_batch_size: 1", "of litgpt .*workbench emulate"),
    ("model:\n  _component_: torchtune.models.llama2\nbatch_size: 2", "settings of torchtune .*workbench emulate"),
    ('model, _ = FastLanguageModel.from_pretrained("x", load_in_4bit=True)\na = TrainingArguments()', "of Unsloth"),
    # github.com/modelscope/ms-swift examples/custom/sft.sh
    ("swift sft --model x --tuner_type lora --max_length 2048 --dataset_num_proc 4", "settings of ms-swift"),
    # github.com/hiyouga/LLaMA-Factory examples/v1/train_lora/train_lora_sft.yaml
    ("model: x\nmodel_class: llm\npeft_config:\n  name: lora\nkernel_config:\n  name: auto\nmicro_batch_size: 1\n"
     "cutoff_len: 8\nlearning_rate: 1.0e-4", "settings of LLaMA-Factory v1 .*workbench emulate"),
    # github.com/zai-org/ChatGLM-6B ptuning/train.sh
    ("python3 main.py --train_file a.json --prompt_column b --response_column c --max_source_length 64 --max_steps 9",
     "settings of a script for sequence-to-sequence models"),
    # github.com/lm-sys/FastChat scripts/train_vicuna_7b.sh
    ("torchrun fastchat/train/train_mem.py --data_path x --bf16 True --lazy_preprocess True", "or FastChat's script"),
    # github.com/AIAnytime/distillanything recipes/gpu-qlora.yaml
    ("teacher:\n  spec: x\ndata:\n  path: y\n  max_seq_len: 8\ntrain:\n  lr: 1\n  batch_size: 2", "no setting is kno"),
    # github.com/huggingface/peft method_comparison/MetaMathQA/default_training_params.json
    ('{"model_id": "x", "dtype": "bfloat16", "batch_size": 4, "lr_scheduler": "cosine"}', "not clear whose"),
    ("swift sft --model Qwen/Qwen2.5-7B --train_type lora --max_length 2048", "settings of ms-swift"),
    ("trl dpo --model_name_or_path x --beta 0.1 --max_length 512 --max_prompt_length 256", "trainers for preferences"),
    ("args = DPOConfig(beta=0.1)", "trainers for preferences"),
    ("stage: dpo\ncutoff_len: 8\ntemplate: x", "stage: dpo: only supervised training of one model"),
    ("stage: kto\ncutoff_len: 8\ntemplate: x", "stage: kto: only supervised"),
    ("base_model: x\nmicro_batch_size: 1\nrl: dpo", "rl: dpo: only supervised"),
    ('{"peft_type": "VERA", "r": 256}', "peft_type: VERA: this adapter has no counterpart"),
    ("a = TrainingArguments(", "cannot be read as Python"),
    ("a = TrainingArguments()\nb = TrainingArguments()", "TrainingArguments is called twice"),
    ("x = Config()", "no call of a class|class Config|peft's Config"),
    ("a = LoraConfig()\nb = IA3Config()", "a class of PEFT's is called twice"),
    ("a = VeraConfig(r=4)", "peft_type: VERA: this adapter has no counterpart"),
    ("a = GPT2Config(n_layer=2)", "no settings of the class GPT2Config are read"),
    ("python a.py --x 1\npython b.py --y 2", "it has 2 commands: paste one"),
]  # fmt: skip
UNUSABLE = [
    ("", "each setting by its name"),
    ("- a\n- b", "but is .'a', 'b'."),
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
    ("base_model: a\nmicro_batch_size: 1\nmicro_batch_size: 8", "micro_batch_size is there twice"),
    ('{"seed": 1, "seed": 2}', "seed is there twice"),
    ("--seed 1 --seed 2", "seed is there twice"),
    ("micro_batch_size: 0", "axolotl.*: micro_batch_size: 0.*'0'|effective_batch_size must be"),
    ("sequence_len: -5\nadapter: lora", "sequence_len: -5: recipe: sequence_length must be"),
    ("learning_rate: .nan\nadapter: lora", "axolotl.*: learning_rate: NaN.*must be a number"),
    ("micro_batch_size: two\ngradient_accumulation_steps: 2", "axolotl.*: micro_batch_size: two.*no whole number"),
    ("adapter: lora\nlora_r: -1", "lora_r: -1.*rank must be"),
    ("per_device_train_batch_size: two\noutput_dir: x", "per_device_train_batch_size cannot be 'two'"),
    ('{"per_device_train_batch_size": "auto", "output_dir": "x"}', "DeepSpeed's auto. Write the number"),
    ('{"lr_scheduler_type": "cosin", "output_dir": "x"}', "cannot be 'cosin'. Known: linear, cosine"),
    ('{"evaluation_strategy": "no", "eval_strategy": "steps"}', "another name of eval_strategy, and they differ"),
    ('{"steps": 5, "stepz": 6}', "recipe has no field 'stepz'.*Did you mean steps"),
    ('{"techniques": {"lroa": {}}}', "Did you mean lora"),
    ("[techniques.lora]\nrank = 0", "lora: rank must be an integer of at least 1"),
]


def test_what_cannot_be_used_is_said_at_once(subtests):
    of("seed: 1")  # which imports transformers
    for text, message in [*REFUSED, *UNUSABLE]:
        with subtests.test(text=text[:60]):
            started = time.monotonic()
            with pytest.raises((ConfigurationError, UnavailableError), match=f"(?s){message}"):
                read_settings(text)
            assert time.monotonic() - started < 3


def test_the_table_names_what_there_is():
    """A misspelt setting of ours would be an error of the program on a user's file."""
    ours = {field.name for field in fields(Recipe)}
    theirs = {name for rule in FOREIGN["rule"] for name in chain(*rule.get("set", {}).values())}
    for rule in FOREIGN["rule"]:
        assert set(rule) <= {"when", "set", "fixed", "says", "technique", "lacks", "refuses"}
        given = {**rule.get("set", {}), **rule.get("fixed", {})}
        assert given.keys() <= (ours if "technique" not in rule else REGISTRY[rule["technique"]]().settings().keys())
        assert given or rule.keys() & {"technique", "says", "lacks", "refuses"}
        theirs |= rule.get("when", {}).keys()
    for table in PROGRAMS.values():
        gifts = {name for gift in table.get("values", {}).values() for name in gift}
        assert gifts | set(table.get("defaults", {})) <= theirs
    assert set(FOREIGN["call"].values()) <= PROGRAMS.keys()
    types = owners.owner("transformers", "TrainingArguments").types
    for name, (successor, since) in FOREIGN["renamed"].items():
        assert name not in types or name.startswith("gradient_checkpointing")
        assert successor in types or "TRL" in since or successor == "dtype"


def test_what_no_control_shows_is_told():
    found = read_settings('callbacks = ["transformers:EarlyStoppingCallback"]\n[arguments]\nweight_decay = 0.1\n')
    assert found.understood == [
        ("arguments.weight_decay", "0.1"),
        ("callbacks", "transformers:EarlyStoppingCallback, whose code a run imports"),
    ]


# ---- what is called harmless ----

HARMLESS = {
    "logging_steps": 5, "logging_first_step": True, "log_level": "warning", "run_name": "mine",
    "eval_strategy": "steps", "eval_steps": 2, "eval_delay": 1, "metric_for_best_model": "loss",
    "greater_is_better": True, "label_names": ["labels"], "remove_unused_columns": False, "ignore_data_skip": True,
}  # fmt: skip


def test_what_is_called_harmless_changes_no_byte_of_the_peak(recipe, fine_tuned):
    brought = read_settings(json.dumps(HARMLESS))
    named = {theirs.partition(":")[0] for theirs, _ in brought.harmless}
    assert named == HARMLESS.keys() - {"eval_strategy"}  # which decides the evaluation's batch
    record = run(replace(recipe, arguments=HARMLESS), device="cpu")
    plain = fine_tuned(recipe)
    assert record.status is Status.OK
    assert record.peak_allocated_bytes == plain.peak_allocated_bytes
    assert record.by_category == plain.by_category
