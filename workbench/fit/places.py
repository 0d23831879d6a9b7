"""Where techniques go in somebody's own training, and which are there: the one table from which all others follow.

`apply` puts them on a Trainer that is here, `inside.py` on one in a program that runs, `edit.py` writes them into its
text, and `WillItFit` names them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import AutoConfig

from workbench.base.settings import changed_settings
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import REGISTRY, Capability, Technique
from workbench.techniques.base import Arguments, Call

# until transformers 5.23, which renamed them
OLDER: Arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
# a loop has no batch that can be cut
OF_A_LOOP: Arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


@dataclass(frozen=True)
class Places:
    """Where a training takes each of some techniques.

    Attributes:
        arguments: the TrainingArguments that are changed.
        on_model: put on the model, before its Trainer is made.
        on_trainer: put on the built Trainer, or on the model of a loop.
        environment: variables in front of the command.
    """

    arguments: Arguments
    on_model: tuple[Technique, ...]
    on_trainer: tuple[Technique, ...]
    environment: dict[str, str]


def places_of(techniques: Iterable[Technique], arguments: Arguments) -> Places:
    """Where a training with these TrainingArguments takes the techniques; effective batches stay what they are."""
    changed: Arguments = {}
    environment: dict[str, str] = {}
    on_model = []
    on_trainer = []
    for entry in techniques:
        if entry.environment():
            environment |= entry.environment()
        elif by_arguments(entry, arguments):
            changed |= changed_arguments(entry, {**arguments, **changed})
        elif Capability.ADAPTER in entry.brings:
            on_model.append(entry)
        else:
            on_trainer.append(entry)
    return Places(changed, tuple(on_model), tuple(on_trainer), environment)


def arguments_of(seen: Mapping[str, Any]) -> Arguments:
    """The TrainingArguments by name of a training of which this was seen; those of a loop cannot be changed."""
    return seen["arguments"] if seen.get("kind") == "trainer" else OF_A_LOOP


def already_there(seen: Mapping[str, Any]) -> list[Technique]:
    """What a training has already, by what `any_training.about` has seen of it, as far as techniques exclude it."""
    # of PEFT's adapters that are no technique here, many are LoRA's kin
    there: list[Technique] = [REGISTRY.get(name, REGISTRY["lora"])() for name in seen["adapters"]]
    arguments = arguments_of(seen)
    for technique in REGISTRY.values():
        entry = technique.there(arguments, seen)
        if entry is not None:
            there.append(entry)
    return there


def names_there(seen: Mapping[str, Any]) -> set[str]:
    """The same by name, and the techniques that such a model is loaded with."""
    names = {entry.name for entry in already_there(seen)}
    try:
        family = family_of(AutoConfig.for_model(**seen["config"]))
    except Exception:
        # of any kind: another kind of model, or a config of a version that is not read here
        return names
    for technique in REGISTRY.values():
        for entry in settings_to_try(technique):
            if entry.loaded_model(family) and entry.model_arguments(family).items() <= seen["config"].items():
                names.add(entry.name)
    return names


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
    if technique.environment():
        return f"{variables(technique.environment())} in front of the command"
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


def variables(environment: dict[str, str]) -> str:
    """As they stand in front of a command."""
    return " ".join(map("=".join, environment.items()))


def settings_to_try(technique: type[Technique]) -> tuple[Technique, ...]:
    """A technique with each of the settings that are worth trying."""
    return tuple(technique(**settings) for settings in technique.worth_trying)


def is_one_switch(technique: Technique) -> bool:
    """Whether the Trainer of every version does it, by one argument that is true or false."""
    return list(filter(None, technique.switches().values())) == [True]


def by_arguments(technique: Technique, arguments: Arguments) -> bool:
    """Whether `changed_arguments` are all that it takes. `arguments` as there."""
    return technique.trainer() is None and bool(changed_arguments(technique, arguments))


def as_calls(techniques: Iterable[Technique]) -> str:
    """`Lora(rank=4), FusedGelu()`, as Python has it."""
    return ", ".join(f"{type(entry).__name__}({as_keywords(changed_settings(entry))})" for entry in techniques)


def as_keywords(arguments: Arguments) -> str:
    """`per_device_train_batch_size=2, optim='adafactor'`, as Python has it."""
    return ", ".join(f"{name}={_source(value)}" for name, value in arguments.items())


def _source(value: Any) -> str:
    if isinstance(value, Call):
        return f"{value.function.__name__}({as_keywords(dict(value.settings))})"
    return repr(value)
