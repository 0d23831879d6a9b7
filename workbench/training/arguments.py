"""The `transformers.TrainingArguments` of a recipe: a run, a prediction and a script share the keyword arguments.

A recipe decides some of them (`Recipe.training_arguments`), `complete_arguments` adds what every run has, and
`build_training_arguments` makes the object.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import torch
from pydantic import Field
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_optimizer import is_optimizer_factory

from workbench.base.errors import UnavailableError, brief, explain_errors, in_a_line
from workbench.base.settings import check_names, type_adapter, unknown_name_error
from workbench.models.family import on_meta
from workbench.recipe import Recipe
from workbench.techniques.base import Arguments

EPOCHS = "num_train_epochs"
CURE = "Change what it names, or leave it out."
# How the names of arguments begin that the optimizer, or the scheduler, is made with.
OPTIMIZER_NAMES = "optim|adam_|weight_decay"
SCHEDULER_NAMES = "lr_scheduler_|warmup_"
# An optimizer with such a setting takes a whole model, and cannot be tried with one parameter.
WHOLE_MODEL_SETTINGS = {"params", "model", "optimizer_dict"}
# transformers takes any number here: a wrong one fails in the first forward pass, or makes another loss without a word.
LIMITS = {"label_smoothing_factor": Field(ge=0, le=1), "neftune_noise_alpha": Field(ge=0)}
# Every run, every prediction and every exported script has these.
ALWAYS: Arguments = {
    "eval_on_start": True,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,  # the default would log a diverged loss as zero
    "save_strategy": "no",
    "report_to": "none",
}


def check_arguments(recipe: Recipe) -> None:
    """Check the recipe's own arguments, one by one.

    Raises:
        ConfigurationError: `TrainingArguments` have no such field, or the value is of another type than it, out of its
            limits or none of its choices.
    """
    # The types are not read from `field.type`: an HfArgumentParser in the same process rewrites these.
    hints = get_type_hints(TrainingArguments)
    entries = {field.name: field for field in fields(TrainingArguments)}
    values = check_names(recipe.arguments, entries, "arguments", "field of transformers.TrainingArguments")
    for name, value in values.items():
        accepted = Annotated[hints[name], LIMITS[name]] if name in LIMITS else hints[name]
        with explain_errors(f"arguments: {name} cannot be {brief(value)}", "See transformers.TrainingArguments."):
            type_adapter(accepted).validate_python(value, strict=True)
        choices = entries[name].metadata.get("choices", [value])
        if value not in choices:
            raise unknown_name_error(f"arguments: {name} cannot be", value, choices)


def check_reports(recipe: Recipe) -> None:
    """Check the programs that the run reports to.

    Raises:
        ConfigurationError: transformers knows no such program.
        UnavailableError: it is not installed.
    """
    programs = recipe.arguments.get("report_to", [])
    names = [programs] if isinstance(programs, str) else programs
    if names in (["all"], ["none"]):
        return
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise unknown_name_error("report_to: there is no", name, INTEGRATION_TO_CALLBACK)
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            message = in_a_line(error)
            cure = "" if "pip install" in message else f" Install it with: pip install {name}"
            raise UnavailableError(f"report_to: {message}.{cure}") from None


def complete_arguments(recipe: Recipe, learning_rate: float) -> Arguments:
    """Return all keyword arguments of a recipe's `TrainingArguments`: those that it decides, and those of every run.

    They hold wherever it trains. Epochs are not among them: the gate makes them steps.
    """
    decided = recipe.training_arguments()
    tokens = decided["per_device_train_batch_size"] * recipe.shape.tokens
    # Evaluation uses the recipe's block length, even if a technique trains on another. By default a batch of it has no
    # more tokens than a micro-batch of the training.
    evaluation_batch_size = recipe.evaluation_batch_size or max(1, tokens // recipe.sequence_length)
    return {
        **decided,
        "learning_rate": learning_rate,
        "warmup_steps": decided["max_steps"] // 10,
        "per_device_eval_batch_size": evaluation_batch_size,
        **ALWAYS,
        **{name: value for name, value in recipe.arguments.items() if name != EPOCHS},
    }


def build_training_arguments(values: Arguments, device_kind: str, folder: Path) -> TrainingArguments:
    """Build the `TrainingArguments` object, in the process that trains: it asks PyTorch for the device.

    Args:
        values: as `complete_arguments` returns them.
        device_kind: `"cuda"`, `"mps"` or `"cpu"`.
        folder: for checkpoints; the run is named after it.

    Raises:
        ConfigurationError: transformers refuses a value.
    """
    defaults: Arguments = {"dataloader_pin_memory": device_kind == "cuda", "run_name": folder.name}
    with explain_errors("arguments: transformers refuses them", CURE):
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=device_kind == "cpu", disable_tqdm=True, **(defaults | values)
        )
    # One GPU, even where there are several: DataParallel would multiply the batch.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def check_optimizer(
    recipe: Recipe, config: PreTrainedConfig, arguments: TrainingArguments, callbacks: Sequence[TrainerCallback]
) -> None:
    """Build optimizer and scheduler for one dummy parameter, so that wrong arguments fail before weights are loaded.

    Only what the recipe's own arguments ask for is tried, and no optimizer that takes a whole model.

    Raises:
        ConfigurationError: they cannot be made, or a callback needs an argument that is not there.
        UnavailableError: the optimizer's package is not installed.
    """
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    names = _describe_matches(recipe.arguments, OPTIMIZER_NAMES)
    if names:
        try:
            with explain_errors(f"arguments: no optimizer can be made with {names}", CURE, ImportError):
                optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, on_meta(config))
                if not (settings.keys() & WHOLE_MODEL_SETTINGS or is_optimizer_factory(optimizer_class)):
                    optimizer = optimizer_class([parameter], **settings)
        except ImportError as error:
            raise UnavailableError(f"arguments: {names}: {in_a_line(error)}.") from None
    names = _describe_matches(recipe.arguments, SCHEDULER_NAMES)
    if names:
        with explain_errors(f"arguments: no scheduler can be made with {names}", CURE):
            get_scheduler(
                arguments.lr_scheduler_type,
                optimizer,
                num_warmup_steps=arguments.get_warmup_steps(arguments.max_steps),
                num_training_steps=arguments.max_steps,
                scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # type: ignore[arg-type]  # no text by now
            )
    for callback in callbacks:
        # The beginning of this callback does nothing but check its arguments.
        if isinstance(callback, EarlyStoppingCallback):
            with explain_errors("callbacks: EarlyStoppingCallback cannot be used", "Name it under arguments."):
                callback.on_train_begin(arguments, TrainerState(), TrainerControl())


def _describe_matches(arguments: Mapping[str, Any], pattern: str) -> str:
    """Return the arguments whose names begin with a pattern, as `name=value, …`."""
    return ", ".join(f"{name}={value!r:.90}" for name, value in arguments.items() if re.match(pattern, name))
