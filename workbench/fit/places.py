"""Where a technique can be put in somebody's own script: on a built Trainer, on a model, or only as an argument."""

from enum import StrEnum
from typing import Any

from workbench.models.family import ModelFamily
from workbench.techniques import Capability, Technique
from workbench.techniques.base import Arguments, Call

# until transformers 5.23, which renamed them
OLDER: Arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


class Site(StrEnum):
    """The latest moment at which a technique can be put on somebody's own training."""

    TRAINER = "a built Trainer, or a model"
    MODEL = "a model, before its Trainer or optimizer is made"
    ARGUMENT = "an argument"


def site_of(technique: Technique, family: ModelFamily) -> Site:
    """Where a technique, set as it is, can be put on a model of this kind."""
    if technique.loaded_model(family) is not None:
        return Site.TRAINER
    if technique.model_arguments(family):  # how weights are loaded
        return Site.ARGUMENT
    if Capability.ADAPTER in technique.brings:
        return Site.MODEL
    if technique.model(family) is not None or technique.trainer() is not None:
        return Site.TRAINER
    return Site.ARGUMENT


def as_argument(technique: Technique, family: ModelFamily, arguments: Arguments) -> str:
    """What a script says instead: arguments of TrainingArguments or of from_pretrained, or the environment.

    Args:
        arguments: the script's TrainingArguments by name, as far as they are known.

    Raises:
        ConfigurationError: the settings do not fit the script's batch.
    """
    changed = changed_arguments(technique, arguments)
    if changed:
        return f"TrainingArguments({as_keywords(changed)})"
    loaded = technique.model_arguments(family)
    if loaded:
        adapter = " and an adapter of PEFT's" if technique.model(family) else ""
        return f"from_pretrained(…, {as_keywords(loaded)}){adapter}"
    environment = technique.environment()
    if environment:
        variables = " ".join(f"{name}={value}" for name, value in environment.items())
        return f"{variables} in front of the command"
    return technique.in_a_script.format(**technique.settings())


def changed_arguments(technique: Technique, arguments: Arguments) -> Arguments:
    """The TrainingArguments with which the Trainer does the technique's work, without those that are so already.

    Args:
        arguments: all that this version of transformers has, with their values.
    """
    decided = technique.training_arguments({"gradient_accumulation_steps": 1, **arguments})
    switches = technique.switches()
    if switches.keys() <= arguments.keys():
        decided |= switches
    elif is_one_switch(technique) and OLDER.keys() <= arguments.keys():
        decided |= OLDER
    return {name: value for name, value in decided.items() if arguments.get(name) != value}


def settings_to_try(kind: type[Technique]) -> tuple[Technique, ...]:
    """A technique with each of the settings that are worth trying."""
    return tuple(kind(**settings) for settings in kind.worth_trying)


def is_one_switch(technique: Technique) -> bool:
    """Whether the Trainer of every version does it, by one argument that is true or false."""
    return list(filter(None, technique.switches().values())) == [True]


def by_arguments(technique: Technique, arguments: Arguments) -> bool:
    """Whether `changed_arguments` are all that it takes. `arguments` as there."""
    return technique.trainer() is None and bool(changed_arguments(technique, arguments))


def as_keywords(arguments: Arguments) -> str:
    """`per_device_train_batch_size=2, optim='adafactor'`, as Python has it."""
    return ", ".join(f"{name}={_source(value)}" for name, value in arguments.items())


def _source(value: Any) -> str:
    if isinstance(value, Call):
        return f"{value.function.__name__}({as_keywords(dict(value.settings))})"
    return repr(value)
