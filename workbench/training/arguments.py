"""A recipe's `transformers.TrainingArguments`: the keyword arguments that a run, a prediction and a script share."""

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

from workbench.base.errors import UnavailableError, brief, explained, in_a_line
from workbench.base.settings import checker, named, unknown
from workbench.models.family import on_meta
from workbench.recipe import Recipe
from workbench.techniques.base import Arguments

EPOCHS = "num_train_epochs"
CURE = "Change what it names, or leave it out."
OF_OPTIMIZER = "optim|adam_|weight_decay"  # how the names of such arguments begin
OF_SCHEDULER = "lr_scheduler_|warmup_"
OF_A_MODEL = {"params", "model", "optimizer_dict"}  # of optimizers that take a whole model
# transformers takes any number: a wrong one fails in the first forward pass, or makes another loss without a word
LIMITS = {"label_smoothing_factor": Field(ge=0, le=1), "neftune_noise_alpha": Field(ge=0)}
# the same for every run, every prediction and every exported script
ALWAYS: Arguments = {
    "eval_on_start": True,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,  # the default would log a diverged loss as zero
    "save_strategy": "no",
    "report_to": "none",
}


def check_arguments(recipe: Recipe) -> None:
    """Raises ConfigurationError: `TrainingArguments` have no such field, or the value is of another type than it, out
    of its limits or none of its choices."""
    # not `field.type`, which an HfArgumentParser in the same process has rewritten
    hints = get_type_hints(TrainingArguments)
    entries = {field.name: field for field in fields(TrainingArguments)}
    values = named(recipe.arguments, entries, "arguments", "field of transformers.TrainingArguments")
    for name, value in values.items():
        accepted = Annotated[hints[name], LIMITS[name]] if name in LIMITS else hints[name]
        with explained(f"arguments: {name} cannot be {brief(value)}", "See transformers.TrainingArguments."):
            checker(accepted).validate_python(value, strict=True)
        choices = entries[name].metadata.get("choices", [value])
        if value not in choices:
            raise unknown(f"arguments: {name} cannot be", value, choices)


def check_reports(recipe: Recipe) -> None:
    """Raises ConfigurationError: transformers knows no such program. UnavailableError: it is not installed."""
    programs = recipe.arguments.get("report_to", [])
    names = [programs] if isinstance(programs, str) else programs
    if names in (["all"], ["none"]):
        return
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise unknown("report_to: there is no", name, INTEGRATION_TO_CALLBACK)
        try:
            INTEGRATION_TO_CALLBACK[name]()
        except (RuntimeError, ImportError) as error:
            message = in_a_line(error)
            cure = "" if "pip install" in message else f" Install it with: pip install {name}"
            raise UnavailableError(f"report_to: {message}.{cure}") from None


def argument_values(recipe: Recipe, learning_rate: float) -> Arguments:
    """The keyword arguments of a recipe's `TrainingArguments`, wherever it trains.

    Epochs are not among them: the gate makes them steps.
    """
    decided = recipe.training_arguments()
    tokens = decided["per_device_train_batch_size"] * recipe.shape.tokens
    # evaluation is on the recipe's own blocks, whatever length is trained on; no more tokens at once than there
    evaluated = recipe.evaluation_batch_size or max(1, tokens // recipe.sequence_length)
    return {
        **decided,
        "learning_rate": learning_rate,
        "warmup_steps": decided["max_steps"] // 10,
        "per_device_eval_batch_size": evaluated,
        **ALWAYS,
        **{name: value for name, value in recipe.arguments.items() if name != EPOCHS},
    }


def training_arguments(values: Arguments, device_kind: str, folder: Path) -> TrainingArguments:
    """The object, where it is used: it looks at the device, and may refuse a value.

    Args:
        values: as `argument_values` has them.
        device_kind: that it trains on, `"cuda"`, `"mps"` or `"cpu"`.
        folder: for checkpoints; the run is named after it.

    Raises:
        ConfigurationError: transformers refuses a value.
    """
    here: Arguments = {"dataloader_pin_memory": device_kind == "cuda", "run_name": folder.name}
    with explained("arguments: transformers refuses them", CURE):
        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=device_kind == "cpu", disable_tqdm=True, **(here | values)
        )
    # with several, DataParallel would multiply the batch
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def check_optimizer(
    recipe: Recipe, config: PreTrainedConfig, arguments: TrainingArguments, callbacks: Sequence[TrainerCallback]
) -> None:
    """Make the optimizer and the scheduler that a recipe's own arguments ask for, of one number.

    Raises:
        ConfigurationError: they cannot be made, or a callback needs an argument that is not there.
        UnavailableError: the optimizer's package is not installed.
    """
    number = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([number])
    names = _like(recipe.arguments, OF_OPTIMIZER)
    if names:
        try:
            with explained(f"arguments: no optimizer can be made with {names}", CURE, ImportError):
                optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(arguments, on_meta(config))
                if not (settings.keys() & OF_A_MODEL or is_optimizer_factory(optimizer_class)):
                    optimizer = optimizer_class([number], **settings)
        except ImportError as error:
            raise UnavailableError(f"arguments: {names}: {in_a_line(error)}.") from None
    names = _like(recipe.arguments, OF_SCHEDULER)
    if names:
        with explained(f"arguments: no scheduler can be made with {names}", CURE):
            get_scheduler(
                arguments.lr_scheduler_type,
                optimizer,
                num_warmup_steps=arguments.get_warmup_steps(arguments.max_steps),
                num_training_steps=arguments.max_steps,
                scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,  # type: ignore[arg-type]  # no text by now
            )
    for callback in callbacks:
        if isinstance(callback, EarlyStoppingCallback):  # whose beginning does nothing but ask
            with explained("callbacks: EarlyStoppingCallback cannot be used", "Name it under arguments."):
                callback.on_train_begin(arguments, TrainerState(), TrainerControl())


def _like(arguments: Mapping[str, Any], pattern: str) -> str:
    return ", ".join(f"{name}={value!r:.90}" for name, value in arguments.items() if re.match(pattern, name))
