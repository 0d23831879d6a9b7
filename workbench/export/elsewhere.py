"""Settings that are rejected, because only their own program knows what they mean, and the command that runs it."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from workbench.base.errors import ConfigurationError

RUN_THE_SCRIPT = "Run the script itself: workbench plan --gpu t4 -- python train.py"


class OtherProgram(NamedTuple):
    """A program whose settings are known by a key or two.

    Attributes:
        title: whose settings these are.
        keys: names that no class which is read has; each of them is enough.
        command: what runs the program on an emulated GPU.
    """

    title: str
    keys: str
    command: str


PROGRAMS = (
    OtherProgram(
        "LLaMA-Factory",
        "finetuning_type cutoff_len dataset_dir quantization_bit lora_target pure_bf16 stage template",
        "workbench emulate --gpu t4 -- llamafactory-cli train FILE.yaml",
    ),
    OtherProgram(
        "axolotl",
        "base_model sequence_len micro_batch_size sample_packing lora_target_linear adapter val_set_size",
        "workbench emulate --gpu t4 -- axolotl train FILE.yaml",
    ),
    OtherProgram(
        "Unsloth",
        "use_gradient_checkpointing finetune_language_layers random_state FastLanguageModel FastModel",
        "workbench plan --gpu t4 -- python train.py",
    ),
    OtherProgram(
        "litgpt",
        "checkpoint_dir lora_query lora_head train.global_batch_size train.lr_warmup_steps",
        "workbench emulate --gpu t4 -- litgpt finetune_lora --config FILE.yaml",
    ),
    OtherProgram(
        "torchtune",
        "_component_ model._component_ optimizer._component_ tokenizer._component_ max_steps_per_epoch",
        "workbench emulate --gpu t4 -- tune run RECIPE --config FILE.yaml",
    ),
    OtherProgram(
        "Composer or LLM Foundry",
        "max_duration device_train_microbatch_size global_train_batch_size device_eval_batch_size train_loader",
        "workbench emulate --gpu t4 -- composer train.py FILE.yaml",
    ),
    OtherProgram(
        "accelerate, which say how a program is started",
        "compute_environment distributed_type main_training_function machine_rank num_machines",
        "workbench plan --gpu t4 -- python train.py",
    ),
    OtherProgram(
        "DeepSpeed",
        "zero_optimization train_micro_batch_size_per_gpu train_batch_size steps_per_print",
        "workbench run … --ranks 2 --shard deepspeed",
    ),
    OtherProgram(
        "ms-swift",
        "train_type tuner_type split_dataset_ratio external_plugins",
        "workbench emulate --gpu t4 -- swift sft …",
    ),
    OtherProgram(
        "a trainer of preferences, rewards or reinforcement learning",
        "beta ref_model max_prompt_length max_completion_length num_generations rpo_alpha desirable_weight rl "
        "undesirable_weight reward_model_path reward_funcs DPOConfig KTOConfig GRPOConfig RewardConfig PPOConfig "
        "ORPOConfig CPOConfig RLOOConfig GKDConfig OnlineDPOConfig BCOConfig NashMDConfig XPOConfig PRMConfig",
        "workbench emulate --gpu t4 -- trl dpo --config FILE.yaml (or grpo, kto, reward)",
    ),
    OtherProgram(
        "transformers' example scripts",
        "block_size train_file validation_file dataset_config_name config_overrides max_source_length "
        "source_prefix prompt_column max_train_samples preprocessing_num_workers overwrite_cache",
        "workbench plan --gpu t4 -- python run_clm.py FILE.json",
    ),
    OtherProgram(
        "nanoGPT",
        "n_layer n_head n_embd max_iters lr_decay_iters eval_iters out_dir init_from",
        "workbench emulate --gpu t4 -- python train.py config/FILE.py",
    ),
    OtherProgram(
        "a notebook", "cells nbformat", "jupyter nbconvert --to script NOTEBOOK.ipynb, then " + RUN_THE_SCRIPT[24:]
    ),
)


def program_with(names: Collection[str]) -> OtherProgram | None:
    """Return the program that has most of these names among its keys; None if none has any."""
    counts = {program: len(set(program.keys.split()).intersection(names)) for program in PROGRAMS}
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
    """Return the sentence that says how to run the program of a command line."""
    match = re.search(r"(?m)^\s*(?:[A-Z_]+=\S+\s+)*(?P<program>[\w./-]+)(?P<rest>.*)", text)
    if match is None:
        return RUN_THE_SCRIPT
    program = match["program"].rpartition("/")[2]
    verb = "plan" if re.fullmatch(r"python[\d.]*", program) else "emulate"
    if not re.fullmatch(r"[a-z][\w.-]*", program):
        return RUN_THE_SCRIPT
    return f"Run it: workbench {verb} --gpu t4 -- {program}{match['rest'].rstrip(' ' + chr(92)):.120}"


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
