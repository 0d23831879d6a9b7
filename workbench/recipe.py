"""A recipe says what to fine-tune, on which text, with which techniques. It is plain data, validated and comparable,
and people write it as a command line or a file."""

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench.base.device import pick_device
from workbench.base.errors import ConfigurationError, brief, explain_errors
from workbench.base.paths import read_beside, read_toml
from workbench.base.settings import (
    check_names,
    check_settings,
    describe_field,
    merge_settings,
    non_default_settings,
    parse_assignment,
    parse_settings,
    setting,
    toml,
)
from workbench.techniques import REGISTRY, Technique
from workbench.techniques.base import Arguments, Call, Capability, Shape, check_together
from workbench.techniques.registry import in_words, parse_technique

if TYPE_CHECKING:
    from workbench.models.family import ModelFamily

EXAMPLE = "Write for example: steps = 50, and below it, a line each, [technique.lora], rank = 16."
FILES = "technique"  # the word for techniques in files, where each has a table
# Fields that came later. They are part of an id only where they say something, so that older ids stay.
LATER = ("evaluation_batch_size", "arguments", "callbacks")
STRATEGY = "train_sampling_strategy"
GROUPED = "group_by_length"
BALANCED = "batch_rebalance"  # micro-batches of about equal cost, and of unequal numbers of rows
# Arguments that a recipe cannot have, as patterns of `name=value`, and what to use instead.
DECIDED = read_beside(__file__, "decided.toml")


@dataclass(frozen=True)
class Recipe:
    """A recipe: everything that decides the result of a fine-tuning run.

    Two runs compare when their recipes differ in the techniques alone. Techniques are kept in the order in which they
    act (`Stage`), so recipes that mean the same are equal; `recipe | Lora(rank=8)` adds one. `arguments` are fields of
    `transformers.TrainingArguments` by their own names; whether there are such is asked before a run, not here, where
    transformers may be another. With `num_train_epochs` among them a run takes the steps of so many epochs. `callbacks`
    are classes of `TrainerCallback`, as `package.module:Class`; a run imports them.

    Raises:
        ConfigurationError: a value out of range, a technique given twice, techniques that exclude each other, a batch
            that a technique cannot split, an argument that a field or a technique decides.
    """

    model: str = setting("auto", "gpt2-tiny, gpt2 … gpt2-xl, a hub id, a folder, random:NAME, or auto (by device)")
    corpus: str = setting(
        "shakespeare", "an embedded text, a path (txt, md, json, jsonl, csv, parquet, …), or a hub's user/set:split"
    )
    # The largest batches of published trainings are thousands of sequences, the longest context is a million tokens.
    effective_batch_size: int = setting(8, "sequences per optimizer step", minimum=1, maximum=2**20)
    sequence_length: int = setting(128, "tokens per sequence", minimum=2, maximum=2**20)
    steps: int = setting(12, "optimizer steps", minimum=1)
    evaluation_batch_size: int | None = setting(
        None, "sequences evaluated at once; none: the tokens of a micro-batch", minimum=1
    )
    learning_rate: float | None = setting(None, "peak learning rate; none: customary", minimum=1e-9, maximum=10.0)
    dropout: float | None = setting(None, "dropout everywhere; none: as the model has it", minimum=0.0, maximum=0.9)
    seed: int = setting(0, "seed of data order, dropout and new weights", minimum=0, maximum=2**32 - 1)
    techniques: tuple[Technique, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    callbacks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self, "recipe")
        if not isinstance(self.techniques, tuple | list):
            raise ConfigurationError(f"recipe: techniques must be a list of them, got {brief(self.techniques)}.")
        for entry in self.techniques:
            if not isinstance(entry, Technique):
                raise ConfigurationError(f"recipe: {brief(entry)} is not a technique. Write for example Lora(rank=8).")
        in_order = sorted(self.techniques, key=lambda technique: (technique.stage, technique.name))
        object.__setattr__(self, "techniques", tuple(in_order))
        check_together(self.techniques, "recipe")
        self._check_arguments()
        self.training_arguments()  # called for its refusals alone

    def _check_arguments(self) -> None:
        """Check arguments and callbacks. Arguments are kept as TOML gives them back, so that a file of them is
        exact."""
        with explain_errors(
            "recipe: these arguments cannot be kept in a file", "Write for example {'weight_decay': 0.1}."
        ):
            lines = [f"{name} = {toml(value)}" for name, value in self.arguments.items()]
            object.__setattr__(self, "arguments", tomllib.loads("\n".join(lines)))
        for (name, value), (patterns, instead) in product(self.arguments.items(), DECIDED.items()):
            if any(fnmatchcase(f"{name}={value}", pattern) for pattern in patterns.split()):
                raise ConfigurationError(f"recipe: arguments cannot have {name}. {instead}")
        names = self.callbacks if isinstance(self.callbacks, tuple | list) else [self.callbacks]
        if not all(isinstance(name, str) and re.fullmatch(r"[\w.]+:\w+", name) for name in names):
            raise ConfigurationError(f"recipe: callbacks are named 'package.module:Class', got {brief(names)}.")
        object.__setattr__(self, "callbacks", tuple(names))

    def __or__(self, other: Technique) -> Self:
        if not isinstance(other, Technique):
            return NotImplemented
        return replace(self, techniques=(*self.techniques, other))

    @property
    def baseline(self) -> Self:
        """The recipe without its techniques."""
        return replace(self, techniques=())

    @property
    def label(self) -> str:
        """The techniques in words, for tables and legends."""
        return " + ".join(sorted(map(_label, self.techniques))) or "baseline"

    @property
    def title(self) -> str:
        """The label for prose, by what people call the techniques: `fused GELU + LoRA (rank=8)`."""
        return in_words(self.label) if self.techniques else "full fine-tuning"

    @property
    def shape(self) -> Shape:
        """The batches that are trained on: the recipe's own, unless a technique asks for others."""
        shape = Shape(self.effective_batch_size, self.sequence_length, self.steps)
        for entry in self.techniques:
            shape = entry.shape(shape)
        return shape

    def training_arguments(self) -> Arguments:
        """Return the keyword arguments of `transformers.TrainingArguments` that this recipe decides.

        Raises:
            ConfigurationError: `arguments` names one of them.
        """
        shape = self.shape
        arguments: Arguments = {
            "per_device_train_batch_size": shape.sequences,
            "gradient_accumulation_steps": 1,
            "max_steps": shape.steps,
            "seed": self.seed,
        }
        for technique in self.techniques:
            arguments = technique.training_arguments(arguments)
            decided = {*arguments}
            if Capability.OPTIMIZER in technique.brings:
                decided |= {"optim", "optim_args"}
            for name in sorted(decided & self.arguments.keys()):
                raise ConfigurationError(
                    f"recipe: arguments has {name}, which {technique.name} decides. Drop one of them."
                )
        return arguments

    @property
    def config(self) -> Any:
        """The config of the model: a hub's is fetched, its weights are not. `auto` is the model that `run` would
        train on this machine. Raises as a run does."""
        from workbench.models import load, source

        return load.load_config(source.locate_config(source.resolve_auto(self.model, pick_device().type)))

    def load(self) -> Any:
        """Load the model on the host, with weights, and do on it what every technique does to a model. Raises as a run
        does."""
        from transformers import set_seed

        from workbench.base.patches.accelerate import leave_deepspeed_alone
        from workbench.models import load, source

        leave_deepspeed_alone()
        located = source.locate(source.resolve_auto(self.model, pick_device().type))
        with load.quiet():
            model = self.load_from(located, load.load_config(located))
        set_seed(self.seed)  # techniques draw the weights that they add
        return self.prepare_model(model)

    def load_from(self, source: Any, config: Any) -> Any:
        """Load the model of a `ModelSource` with its config, as the techniques ask. No technique has changed it yet."""
        from workbench.models import load
        from workbench.models.family import family_of

        return Call(load.load_model, self.model_arguments(family_of(config)))(source, config)

    def model_arguments(self, family: "ModelFamily") -> Arguments:
        """Return the keyword arguments of `from_pretrained` that the recipe decides. A value may be a Call that makes
        it."""
        arguments: Arguments = {}
        if self.dropout is not None:
            arguments = dict.fromkeys(family.dropout_fields, self.dropout)
        for technique in self.techniques:
            arguments |= technique.model_arguments(family)
        return arguments

    def prepare_model(self, model: Any) -> Any:
        """Do on a loaded model what every technique does to a model, and return it. Raises ConfigurationError: it does
        not suit one."""
        for technique in self.techniques:
            model = technique.apply_to(model)
        for technique in self.techniques:
            technique.check_model(model)
        return model

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as JSON-ready data. Inverse of `from_dict`."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["callbacks"] = [*self.callbacks]
        # These come last, and only where they say something: ids of older recipes stay as they are.
        for name in LATER:
            value = data.pop(name)
            if value:
                data[name] = value
        data["techniques"] = {entry.name: {**entry.settings(), **entry.retired} for entry in self.techniques}
        return data

    @classmethod
    def from_dict(cls, data: object, instead: Sequence[Technique] = ()) -> Self:
        """Make a recipe of data, as `to_dict` returns it.

        Args:
            instead: techniques that take the place of those in the data that have their names.

        Raises:
            ConfigurationError: an unknown field, technique or setting, or data that are no mapping.
        """
        if isinstance(data, cls):
            return data
        known_fields = [FILES, *(field_.name for field_ in fields(cls))]
        values = check_names(data, sorted(known_fields), "recipe", "field")
        table = check_names(values.pop("techniques", {}), sorted(REGISTRY), "recipe", FILES)
        table = merge_settings(table, check_names(values.pop(FILES, {}), sorted(REGISTRY), "recipe", FILES))
        replaced = {technique.name for technique in instead}
        techniques = [*instead]
        for name, settings in table.items():
            if name not in replaced:
                techniques.append(REGISTRY[name].from_settings(settings))
        return cls(**values, techniques=tuple(techniques))

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, equal for equal recipes."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:12]


def _label(entry: Any) -> str:
    """Return a technique's name with the settings that nobody would guess, as `lora(rank=4)`."""
    changed = non_default_settings(entry)
    shown = []
    for field_ in fields(entry):
        if field_.name in changed or field_.metadata.get("in_label"):
            shown.append(f"{field_.name}={getattr(entry, field_.name)}")
    return f"{entry.name}({', '.join(shown)})" if shown else entry.name


# ---- a recipe as people write it: a command line, a file ----


def as_command(recipe: Recipe) -> str:
    """Write the command line that runs this recipe."""
    command = ["python", "-m", "workbench", "run", recipe.model]
    for name, value in non_default_settings(recipe, "model", "techniques", "arguments", "callbacks").items():
        command += [flag(name), _write(value)]
    for technique in by_name(recipe):
        settings = [f"{name}:{_write(value)}" for name, value in non_default_settings(technique).items()]
        command += ["--technique", f"{technique.name}={','.join(settings)}".rstrip("=")]
    for name, value in recipe.arguments.items():
        command += ["--set", f"arguments.{name}={toml(value)}"]
    if recipe.callbacks:
        command += ["--set", f"callbacks={toml(recipe.callbacks)}"]
    return shlex.join(command)


def as_toml(recipe: Recipe) -> str:
    """Write a recipe file: the model, and all that is not as by default. Inverse of `read_recipe`."""
    lines = assignments({"model": recipe.model, **non_default_settings(recipe, "techniques", "arguments")})
    for technique in by_name(recipe):
        lines += ["", f"[technique.{technique.name}]", *assignments(non_default_settings(technique))]
    if recipe.arguments:
        lines += ["", "[arguments]", *assignments(recipe.arguments)]
    return "\n".join([*lines, ""])


def assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {toml(value)}" for name, value in settings.items()]


def by_name(recipe: Recipe) -> list[Technique]:
    return sorted(recipe.techniques, key=lambda technique: technique.name)


def read_recipe(path: Path | str) -> Recipe:
    """Read the recipe in a file. Paths in it are relative to the working directory, not to the folder of the file.

    Raises ConfigurationError for a file that is no TOML, and as `Recipe.from_dict`.
    """
    return Recipe.from_dict(read_toml(Path(path), "recipe", EXAMPLE))


def parse_recipe(
    values: Mapping[str, str],
    techniques: Iterable[str] = (),
    changes: Iterable[str] = (),
    file: Recipe | None = None,
) -> Recipe:
    """Make a recipe of texts, as typed on a command line.

    Args:
        values: fields by their names.
        techniques: as `lora=rank:8`.
        changes: as `technique.lora.rank=16`.
        file: the recipe of a file; all that is typed goes over it.

    Raises ConfigurationError for a text that cannot be read, and as the recipe itself does.
    """
    fields_of_recipe = parse_settings(Recipe, values, "run")
    data = tomllib.loads(as_toml(file)) if file is not None else {}
    for change in changes:
        data = merge_settings(data, parse_assignment(change))
    return Recipe.from_dict(data | fields_of_recipe, [parse_technique(text) for text in techniques])


def recipe_options() -> dict[str, tuple[str, str]]:
    """Return the option and its help for each field that a command line has one for, by the field's name."""
    options = {}
    for field_ in fields(Recipe):
        if "help" in field_.metadata:
            meaning = f"{field_.metadata['help']} ({describe_field(field_)}; default {_write(field_.default)})"
            options[field_.name] = (flag(field_.name), meaning)
    return options


def flag(field_name: str) -> str:
    """Return the option of a field on the command line. People know some by a shorter name."""
    if field_name == "effective_batch_size":
        return "--batch-size"
    return "--" + field_name.replace("_", "-")


def _write(value: Any) -> str:
    """Write a value as the command line reads it back."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
