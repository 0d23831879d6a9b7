"""Hugging Face's classes of settings, and what each of their fields means to a recipe.

A field is one of four things. `READ`: `settings.py` translates it. `PASSED`: it goes into `Recipe.arguments` as it is.
`HARMLESS`: it does not change the memory of a training step, for the reason that is given. `NOT_COVERED`: it may change
the memory, and a prediction leaves it out; the text says what the field is about. A test fails on a field that is in
none of them, which is how a new release is noticed.

Read in the sources of transformers 5.23, TRL 1.16 and PEFT 0.21, November 2026.
"""

import dataclasses
import inspect
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from workbench.base.errors import UnavailableError

PACKAGES = {
    "TrainingArguments": "transformers",
    "SFTConfig": "trl",
    "ModelConfig": "trl",
    "ScriptArguments": "trl",
    "DatasetMixtureConfig": "trl",
    "LoraConfig": "peft",
    "IA3Config": "peft",
    "PrefixTuningConfig": "peft",
    "PromptTuningConfig": "peft",
    "BitsAndBytesConfig": "transformers",
}
ADAPTERS = {
    "LORA": "LoraConfig",
    "IA3": "IA3Config",
    "PREFIX_TUNING": "PrefixTuningConfig",
    "PROMPT_TUNING": "PromptTuningConfig",
}
# `trl sft --config` reads a file into these.
SFT = ("SFTConfig", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig")

# Older names of fields, with the current one and the release that renamed it. The version is the first that has the
# newer name, as found in the wheels of each version and in TRL's history.
RENAMED = {
    "evaluation_strategy": ("eval_strategy", "transformers 4.41"),
    "no_cuda": ("use_cpu", "transformers 4.32"),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", "transformers 2.11"),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", "transformers 2.11"),
    "warmup_ratio": ("warmup_steps", "transformers 5.0"),
    "group_by_length": ("train_sampling_strategy", "transformers 5.0"),
    "include_tokens_per_second": ("include_num_input_tokens_seen", "transformers 5.0"),
    "push_to_hub_model_id": ("hub_model_id", "transformers 4.11"),
    "push_to_hub_token": ("hub_token", "transformers 4.11"),
    "gradient_checkpointing": ("activation_checkpointing", "transformers 5.23"),
    "gradient_checkpointing_kwargs": ("activation_checkpointing_kwargs", "transformers 5.23"),
    "torch_dtype": ("dtype", "transformers 4.56"),
    "max_seq_length": ("max_length", "TRL 0.16"),
    "use_liger": ("use_liger_kernel", "TRL 0.16"),
    "model_name": ("model_name_or_path", "TRL 0.7.11"),
}
# ---- reasons that several classes have ----

FILES = "it says where files, logs and reports go"
DURATION = "it says how long the training goes on, and every step needs the same memory"
EVALUATION = "it says when and how often is evaluated"
DATASET = "it says which examples are read; the batch and the length decide the memory"
FULL = "every sequence of a prediction is full, which needs the most memory"
ORIGIN = "it says where the model and its tokenizer come from"
STARTED = "it says how the program is started or watched"
VALUES = "it changes values and not sizes"
SEVERAL_GPUS = "several GPUs: use --ranks and --shard of run and predict"
VARIANT = "a variant of the adapter"

READ = {
    "TrainingArguments": """per_device_train_batch_size gradient_accumulation_steps max_steps learning_rate seed bf16
        fp16 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
        gradient_checkpointing_kwargs optim optim_args eval_strategy do_eval per_device_eval_batch_size
        dataloader_num_workers""",
    "SFTConfig": "model_init_kwargs max_length pad_to_multiple_of loss_type activation_offloading",
    "ModelConfig": """model_name_or_path model_revision dtype attn_implementation use_peft lora_r lora_alpha
        lora_dropout lora_target_modules use_dora load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant""",
    "LoraConfig": "base_model_name_or_path r lora_alpha lora_dropout target_modules use_dora",
    "IA3Config": "base_model_name_or_path",
    "PrefixTuningConfig": "base_model_name_or_path num_virtual_tokens",
    "PromptTuningConfig": "base_model_name_or_path num_virtual_tokens",
    "BitsAndBytesConfig": """load_in_4bit bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_compute_dtype""",
}
PASSED = {
    "TrainingArguments": """lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_target_modules weight_decay
        adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices max_grad_norm label_smoothing_factor
        bf16_full_eval fp16_full_eval use_cache neftune_noise_alpha torch_empty_cache_steps data_seed
        eval_accumulation_steps eval_do_concat_batches dataloader_drop_last dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_in_order train_sampling_strategy""",
}
BY_PEFT = "PEFT takes it from the model"
OF_A_BASE = {
    ORIGIN: "task_type peft_type auto_mapping peft_version revision",
    "an adapter that is trained further needs the same memory as a new one": "inference_mode",
}
HARMLESS = {
    "TrainingArguments": {
        FILES: """output_dir logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
            include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
            trackio_space_id trackio_bucket_id trackio_static_space_id save_only_model save_strategy save_steps
            save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id
            hub_strategy hub_always_push hub_revision debug skip_memory_metrics resume_from_checkpoint
            restore_callback_states_from_checkpoint""",
        DURATION: "num_train_epochs load_best_model_at_end metric_for_best_model greater_is_better",
        EVALUATION: "eval_steps eval_delay eval_on_start",
        "without a compute_metrics function, an evaluation keeps no logits": """prediction_loss_only
            include_for_metrics batch_eval_metrics eval_use_gather_object""",
        DATASET: "ignore_data_skip remove_unused_columns label_names length_column_name",
        STARTED: "use_cpu do_train do_predict",
        "it says how several GPUs share batches": "accelerator_config",
        "it is about memory of the host": "dataloader_pin_memory dataloader_multiprocessing_context",
    },
    "SFTConfig": {
        ORIGIN: "trust_remote_code chat_template_path eos_token pad_token",
        DATASET: "dataset_text_field dataset_kwargs dataset_num_proc truncation_mode shuffle_dataset",
        FULL: """packing packing_strategy padding_free eval_packing completion_only_loss assistant_only_loss""",
    },
    "ModelConfig": {ORIGIN: "lora_task_type", VALUES: "use_rslora"},
    "ScriptArguments": {
        DATASET: "dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming",
        STARTED: "ignore_bias_buffers",
    },
    "DatasetMixtureConfig": {DATASET: "datasets streaming test_split_size"},
    "LoraConfig": {
        **OF_A_BASE,
        VALUES: "fan_in_fan_out use_rslora alpha_pattern",
        "it is read only with another field": "megatron_core qalora_group_size",
    },
    "IA3Config": {**OF_A_BASE, VALUES: "fan_in_fan_out init_ia3_weights"},
    "PrefixTuningConfig": {
        **OF_A_BASE,
        VALUES: "init_weights",
        BY_PEFT: "token_dim num_transformer_submodules num_attention_heads num_layers",
    },
    "PromptTuningConfig": {
        **OF_A_BASE,
        BY_PEFT: "token_dim num_transformer_submodules num_attention_heads num_layers",
        VALUES: "prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs",
    },
}
NOT_COVERED = {
    "TrainingArguments": {
        SEVERAL_GPUS: """deepspeed fsdp fsdp_config parallelism_config local_rank ddp_backend
            ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout""",
        "a batch size that is found by trying": "auto_find_batch_size",
        "torch.compile: switch on the technique torch_compile": """torch_compile torch_compile_backend
            torch_compile_mode""",
        "Liger's kernels: switch on chunked_cross_entropy for the loss; the others are left out": """use_liger_kernel
            liger_kernel_config""",
        "deterministic algorithms, whose workspaces differ": "full_determinism",
        "TF32 matrix multiplications, whose workspaces may differ": "tf32",
    },
    "SFTConfig": {"the auxiliary loss of a mixture of experts": "router_aux_loss_coef"},
    "ModelConfig": {
        "8-bit weights: the weights are predicted unquantized": "load_in_8bit",
        "the type in which 4-bit weights are stored": "bnb_4bit_quant_storage",
        "parameters that are trained whole, with gradients and optimizer states": "lora_modules_to_save",
        "adapters of parameters that are not matrices of a layer": "lora_target_parameters",
    },
    "LoraConfig": {
        "parameters that are trained whole, with gradients and optimizer states": """modules_to_save
            trainable_token_indices bias lora_bias""",
        "which layers have an adapter, and of which rank": """exclude_modules layers_to_transform layers_pattern
            rank_pattern layer_replication target_parameters ensure_weight_tying""",
        "how an adapter begins, for which some ways change the base weights": """init_lora_weights loftq_config
            eva_config corda_config lora_ga_config""",
        VARIANT: """velora_config alora_invocation_tokens use_qalora monteclora_config use_bdlora arrow_config
            kasa_config megatron_config runtime_config""",
    },
    "IA3Config": {
        "which layers have an adapter": "target_modules exclude_modules feedforward_modules",
        "parameters that are trained whole, with gradients and optimizer states": "modules_to_save",
    },
    "PrefixTuningConfig": {
        "a network that computes the prefix": "prefix_projection encoder_hidden_size",
        "parameters that are trained whole, with gradients and optimizer states": "modules_to_save",
    },
    "PromptTuningConfig": {
        "parameters that are trained whole, with gradients and optimizer states": "modules_to_save",
    },
    "BitsAndBytesConfig": {
        "8-bit weights: the weights are predicted unquantized": """load_in_8bit llm_int8_threshold
            llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight""",
        "the type in which 4-bit weights are stored": "bnb_4bit_quant_storage",
    },
}


@cache
def find_class(name: str) -> Any:
    """Return a class of settings. Raises UnavailableError if its package is not installed, or too old to have it."""
    package = PACKAGES[name]
    settings_class = getattr(import_module(package), name, None) if find_spec(package) else None
    if settings_class is None:
        raise UnavailableError(f"recipe: {name} is a class of {package}. Install it: pip install -U {package}")
    return settings_class


@cache
def defaults_of(name: str) -> dict[str, Any]:
    """Return the fields of a class with their defaults; `dataclasses.MISSING` for a field that has none."""
    settings_class = find_class(name)
    parameters = inspect.signature(settings_class).parameters
    if "kwargs" in parameters:  # BitsAndBytesConfig is a dataclass, but its settings are arguments of its `__init__`
        return {name: parameter.default for name, parameter in parameters.items() if name != "kwargs"}
    defaults = {}
    for field in dataclasses.fields(settings_class):
        if field.default_factory is dataclasses.MISSING:
            defaults[field.name] = field.default
        else:
            defaults[field.name] = field.default_factory()
    return defaults


def name_with_version(name: str) -> str:
    """Return how a class is called in messages: `SFTConfig (trl 1.16.0)`."""
    return f"{name} ({PACKAGES[name]} {version(PACKAGES[name])})"


def tables_of(name: str) -> tuple[str, ...]:
    """Return the classes whose tables hold the fields of a class: its own, and for SFTConfig its base's."""
    return ("SFTConfig", "TrainingArguments") if name == "SFTConfig" else (name,)


def lists(table: dict[str, str], name: str, field: str) -> bool:
    """Whether a table of field names has a field of a class."""
    return any(field in table.get(part, "").split() for part in tables_of(name))


def reason_in(table: dict[str, dict[str, str]], name: str, field: str) -> str:
    """Return the reason under which a table has a field of a class; empty if it has none."""
    for part in tables_of(name):
        for reason, fields in table.get(part, {}).items():
            if field in fields.split():
                return reason
    return ""
