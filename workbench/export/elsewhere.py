"""Settings that are rejected, because only their own program knows what they mean, and the command that runs it."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from workbench.base.errors import ConfigurationError

RUN_THE_SCRIPT = "Run the script itself: workbench plan --gpu t4 -- python train.py"


class OtherProgram(NamedTuple):
    """A program whose settings are known by a few keys.

    Attributes:
        title: whose settings these are.
        sure: names of which one is enough.
        likely: names of which two are needed, because others have them too.
        command: what runs the program on an emulated GPU.
    """

    title: str
    sure: str
    likely: str
    command: str


PROGRAMS = (
    OtherProgram(
        "LLaMA-Factory",
        "finetuning_type cutoff_len",
        "stage template dataset_dir quantization_bit lora_target pure_bf16",
        "workbench emulate --gpu t4 -- llamafactory-cli train FILE.yaml",
    ),
    OtherProgram(
        "axolotl",
        "sequence_len sample_packing lora_target_linear",
        "base_model micro_batch_size adapter val_set_size optim_args",
        "workbench emulate --gpu t4 -- axolotl train FILE.yaml",
    ),
    OtherProgram(
        "Unsloth",
        "FastLanguageModel FastModel FastVisionModel finetune_language_layers",
        "use_gradient_checkpointing random_state",
        "workbench plan --gpu t4 -- python train.py",
    ),
    OtherProgram(
        "litgpt",
        "lora_query lora_head train.lr_warmup_steps",
        "checkpoint_dir out_dir train.global_batch_size",
        "workbench emulate --gpu t4 -- litgpt finetune_lora --config FILE.yaml",
    ),
    OtherProgram(
        "torchtune",
        "_component_ model._component_ optimizer._component_ tokenizer._component_",
        "",
        "workbench emulate --gpu t4 -- tune run RECIPE --config FILE.yaml",
    ),
    OtherProgram(
        "Composer or LLM Foundry",
        "device_train_microbatch_size",
        "max_duration global_train_batch_size device_eval_batch_size train_loader",
        "workbench emulate --gpu t4 -- composer train.py FILE.yaml",
    ),
    OtherProgram(
        "accelerate, which say how a program is started",
        "compute_environment distributed_type",
        "main_training_function machine_rank num_machines",
        "workbench plan --gpu t4 -- python train.py",
    ),
    OtherProgram(
        "DeepSpeed",
        "zero_optimization train_micro_batch_size_per_gpu",
        "train_batch_size steps_per_print zero_allow_untested_optimizer",
        "workbench run … --ranks 2 --shard deepspeed",
    ),
    OtherProgram("mlx-lm", "fine_tune_type lora_parameters", "", "it trains on Apple's GPUs, which are not emulated"),
    OtherProgram(
        "ms-swift",
        "tuner_type split_dataset_ratio",
        "train_type external_plugins",
        "workbench emulate --gpu t4 -- swift sft …",
    ),
    OtherProgram(
        "a trainer of preferences, rewards or reinforcement learning",
        "rl num_generations max_prompt_length rpo_alpha desirable_weight undesirable_weight reward_funcs "
        "log_completions DPOConfig KTOConfig GRPOConfig RewardConfig PPOConfig ORPOConfig CPOConfig RLOOConfig "
        "GKDConfig BCOConfig "
        "OnlineDPOConfig NashMDConfig XPOConfig PRMConfig",
        "beta ref_model max_completion_length reward_model_path loss_type",
        "workbench emulate --gpu t4 -- trl dpo --config FILE.yaml (or grpo, kto, reward)",
    ),
    OtherProgram(
        "a script made after transformers' examples, such as run_clm.py",
        "",
        "block_size train_file validation_file dataset_config_name config_overrides max_source_length source_prefix "
        "prompt_column max_train_samples preprocessing_num_workers overwrite_cache model_name_or_path",
        "workbench plan --gpu t4 -- python run_clm.py FILE.json",
    ),
    OtherProgram(
        "nanoGPT",
        "lr_decay_iters",
        "n_layer n_head n_embd max_iters eval_iters out_dir init_from",
        "workbench emulate --gpu t4 -- python train.py config/FILE.py",
    ),
    OtherProgram(
        "a notebook",
        "nbformat",
        "",
        "jupyter nbconvert --to script train.ipynb, and workbench plan --gpu t4 -- python train.py",
    ),
)
NOT_A_PROGRAM = re.compile(r"(set|export|cd|echo|source|mkdir|pip|conda|module|if|for|while|fi|done|then|else)\b|\w+=")


def program_with(names: Collection[str]) -> OtherProgram | None:
    """Return the program that has most of these names among its keys; None if none has enough."""
    counts = {}
    for program in PROGRAMS:
        sure = len({*program.sure.split()}.intersection(names))
        likely = len({*program.likely.split()}.intersection(names))
        counts[program] = sure + likely if sure or likely > 1 else 0
    program = max(counts, key=lambda program: counts[program])
    return program if counts[program] else None


def names_in(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of settings, and as `outer.inner` the names inside of them."""
    names = []
    for name, value in settings.items():
        names.append(name)
        if isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in value]
    return names


def rejection_of_program(program: OtherProgram) -> ConfigurationError:
    return ConfigurationError(
        f"recipe: these are settings of {program.title}, and only that program knows what they mean. "
        f"Run it: {program.command}"
    )


def command_for(text: str) -> str:
    """Return the sentence that says how to run the program of a command line or of a shell script."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    for line in lines:
        # Variables for one command may stand before it.
        command = re.sub(r"^\s*([A-Z_]+=\S+\s+)*", "", line)
        if " --" not in command or NOT_A_PROGRAM.match(command):
            continue
        path, _, options = " ".join(command.split()).partition(" ")
        program = path.rpartition("/")[2]
        if re.fullmatch(r"[a-z][\w.-]*", program):
            verb = "plan" if re.fullmatch(r"python[\d.]*", program) else "emulate"
            return f"Run it: workbench {verb} --gpu t4 -- {program} {options:.120}"
    return RUN_THE_SCRIPT


def rejection_of_script(text: str, line: int, reason: str) -> ConfigurationError:
    """Return the error for Python text of which a line is not a call with plain values."""
    lines = text.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else ""
    program = program_with(re.findall(r"\w+", text))
    command = RUN_THE_SCRIPT
    if program is not None and program.title.startswith(("Unsloth", "a trainer")):
        reason = f"it has settings of {program.title}"
    return ConfigurationError(
        f"recipe: Python text is read only if it is nothing but calls such as TrainingArguments(fp16=True), because "
        f"a program means what it does. Line {line}, {shown[:80]!r}: {reason}. {command}"
    )
