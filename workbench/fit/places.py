"""The places of techniques in somebody's own training: where each of them goes, and which of them are used already.

Everything that changes a training asks here: `apply` puts techniques on a Trainer of this process, `inside.py` on one
in a program that runs, `edit.py` writes them into a script's text, and `WillItFit` names them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers import AutoConfig

from workbench.base.settings import non_default_settings
from workbench.fit.any_training import Facts
from workbench.models.family import ModelFamily, family_of
from workbench.techniques import REGISTRY, Capability, Technique
from workbench.techniques.base import Arguments, Call

Techniques = tuple[Technique, ...]

# The switch of gradient checkpointing before transformers 5.23, which renamed it.
OLDER: Arguments = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
# A loop's batch cannot be cut into micro-batches from outside, so it counts as one row.
OF_A_LOOP: Arguments = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


@dataclass(frozen=True)
class Places:
    """The places where a training takes some techniques.

    Attributes:
        arguments: the TrainingArguments that change, with their new values.
        on_model: techniques for the model, before its Trainer is made.
        on_trainer: techniques for the built Trainer, or for the model of a loop.
        environment: variables in front of the command, by name.
    """

    arguments: Arguments
    on_model: Techniques
    on_trainer: Techniques
    environment: dict[str, str]


def places_of(techniques: Iterable[Technique], arguments: Arguments) -> Places:
    """Sort techniques by the places where a training with these TrainingArguments takes them. Effective batches stay
    what they are."""
    changed: Arguments = {}
    environment: dict[str, str] = {}
    on_model = []
    on_trainer = []
    for entry in techniques:
        if entry.environment():
            environment |= entry.environment()
        elif by_arguments(entry, arguments):
            changed |= arguments_to_change(entry, {**arguments, **changed})
        elif Capability.ADAPTER in entry.brings:
            on_model.append(entry)
        else:
            on_trainer.append(entry)
    return Places(changed, tuple(on_model), tuple(on_trainer), environment)


def arguments_of(facts: Facts) -> Arguments:
    """Return a training's TrainingArguments by name; of a loop, which has none, OF_A_LOOP."""
    return facts["arguments"] if facts.get("kind") == "trainer" else OF_A_LOOP


def detect_techniques(facts: Facts) -> list[Technique]:
    """List the techniques that a training uses already, as far as others exclude them.

    Args:
        facts: those of `any_training.about` included.
    """
    # An adapter that is no technique here counts as LoRA: many of PEFT's are its kin.
    present: list[Technique] = [REGISTRY.get(name, REGISTRY["lora"])() for name in facts["adapters"]]
    arguments = arguments_of(facts)
    for technique in REGISTRY.values():
        entry = technique.find_in(arguments, facts)
        if entry is not None:
            present.append(entry)
    return present


def detect_names(facts: Facts) -> set[str]:
    """Return the names of the techniques that a training uses already, those with which its model was loaded included.

    Args:
        facts: those of `any_training.about` included.
    """
    names = {entry.name for entry in detect_techniques(facts)}
    try:
        family = family_of(AutoConfig.for_model(**facts["config"]))
    except Exception:
        # The model is of another kind, or this transformers does not read its config, and then raises anything.
        return names
    for technique in REGISTRY.values():
        for entry in settings_to_try(technique):
            if entry.change_loaded_model(family) and entry.model_arguments(family).items() <= facts["config"].items():
                names.add(entry.name)
    return names


class Site(StrEnum):
    """The latest moment at which a technique can be put on somebody's own training."""

    TRAINER = "a built Trainer, or a model"
    MODEL = "a model, before its Trainer or optimizer is made"
    ARGUMENT = "an argument"


def site_of(technique: Technique, family: ModelFamily) -> Site:
    """Return the latest moment at which a technique, set as it is, can be put on a model of this family."""
    if technique.change_loaded_model(family) is not None:
        return Site.TRAINER
    if technique.model_arguments(family):  # It decides how weights are loaded.
        return Site.ARGUMENT
    if Capability.ADAPTER in technique.brings:
        return Site.MODEL
    if technique.model(family) is not None or technique.trainer() is not None:
        return Site.TRAINER
    return Site.ARGUMENT


def as_argument(technique: Technique, family: ModelFamily, arguments: Arguments) -> str:
    """Return the source that gives a script the technique without `apply`: arguments of TrainingArguments or of
    from_pretrained, or variables of the environment.

    Args:
        arguments: the script's TrainingArguments by name, as far as they are known.

    Raises:
        ConfigurationError: the settings do not fit the script's batch.
    """
    changed = arguments_to_change(technique, arguments)
    if changed:
        return f"TrainingArguments({as_keywords(changed)})"
    loaded = technique.model_arguments(family)
    if loaded:
        adapter = " and an adapter of PEFT's" if technique.model(family) else ""
        return f"from_pretrained(…, {as_keywords(loaded)}){adapter}"
    if technique.environment():
        return f"{variables(technique.environment())} in front of the command"
    return technique.in_a_script.format(**technique.settings())


def arguments_to_change(technique: Technique, arguments: Arguments) -> Arguments:
    """Return the TrainingArguments with which the Trainer does the technique's work, without those that have these
    values already.

    Args:
        arguments: all that the training's version of transformers has, with their values.
    """
    decided = technique.training_arguments({"gradient_accumulation_steps": 1, **arguments})
    switches = technique.switches()
    if switches.keys() <= arguments.keys():
        decided |= switches
    elif is_one_switch(technique) and OLDER.keys() <= arguments.keys():
        decided |= OLDER
    return {name: value for name, value in decided.items() if arguments.get(name) != value}


def variables(environment: dict[str, str]) -> str:
    """Write environment variables as they stand in front of a shell's command: `NAME=value OTHER=value`."""
    return " ".join(map("=".join, environment.items()))


def settings_to_try(technique: type[Technique]) -> Techniques:
    """Return the technique once with each of the settings that are worth trying."""
    return tuple(technique(**settings) for settings in technique.worth_trying)


def is_one_switch(technique: Technique) -> bool:
    """Whether every version's Trainer does the technique's work by one argument that is true or false."""
    return list(filter(None, technique.switches().values())) == [True]


def by_arguments(technique: Technique, arguments: Arguments) -> bool:
    """Whether `arguments_to_change` do all of the technique's work, given the training's `arguments`."""
    return technique.trainer() is None and bool(arguments_to_change(technique, arguments))


def as_calls(techniques: Iterable[Technique]) -> str:
    """Write techniques as Python calls: `Lora(rank=4), FusedGelu()`."""
    return ", ".join(f"{type(entry).__name__}({as_keywords(non_default_settings(entry))})" for entry in techniques)


def as_keywords(arguments: Arguments) -> str:
    """Write arguments as Python keywords: `per_device_train_batch_size=2, optim='adafactor'`."""
    return ", ".join(f"{name}={_source(value)}" for name, value in arguments.items())


def _source(value: Any) -> str:
    """Write a value as Python source."""
    if isinstance(value, Call):
        return f"{value.function.__name__}({as_keywords(dict(value.settings))})"
    return repr(value)
