"""A recipe: what to fine-tune, on which text, with which techniques. Plain data, validated, comparable."""

import hashlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import permutations, product
from pathlib import Path
from typing import Any, Self

from workbench.errors import ConfigurationError, brief, explained
from workbench.paths import beside, read_toml
from workbench.settings import assigned, check_settings, described, merged, named, parse_settings, setting, toml
from workbench.techniques import REGISTRY, Technique, parse_technique
from workbench.techniques.base import Arguments, Capability, Shape

FILE = ".toml"  # how the name of a recipe file ends
EXAMPLE = "Write for example: steps = 50, and below it, a line each, [technique.lora], rank = 16."
FILES = "technique"  # the word for techniques in files, where each has a table
LATER = ("evaluation_batch_size", "arguments", "callbacks")  # fields that came later: they are in an id if given
DECIDED = beside(__file__, "decided.toml")  # arguments that are decided here: by pattern, what to use instead


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a fine-tuning run.

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
    # the largest batches of published trainings are thousands of sequences, and the longest context is a million tokens
    effective_batch_size: int = setting(8, "sequences per optimizer step", unit="sequences", minimum=1, maximum=2**20)
    sequence_length: int = setting(128, "tokens per sequence", unit="tokens", minimum=2, maximum=2**20)
    steps: int = setting(12, "optimizer steps", minimum=1)
    evaluation_batch_size: int | None = setting(
        None, "sequences evaluated at once; none: the tokens of a micro-batch", unit="sequences", minimum=1
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
        object.__setattr__(self, "techniques", tuple(sorted(self.techniques, key=lambda t: (t.stage, t.name))))
        for one, other in permutations(self.techniques, 2):
            if one.name == other.name:
                raise ConfigurationError(f"recipe: {one.name} is given twice. Keep one of the two settings.")
            for capability in one.forbids & other.brings:
                raise ConfigurationError(
                    f"recipe: {other.name} brings {capability}, which {one.name} forbids. Drop one of the two."
                )
        self._check_passed_on()
        self.training_arguments()

    def _check_passed_on(self) -> None:
        """Arguments are kept as TOML gives them back, so that a file of them is exact."""
        with explained("recipe: these arguments cannot be kept in a file", "Write for example {'weight_decay': 0.1}."):
            lines = [f"{name} = {toml(value)}" for name, value in self.arguments.items()]
            object.__setattr__(self, "arguments", tomllib.loads("\n".join(lines)))
        for (name, value), (patterns, words) in product(self.arguments.items(), DECIDED.items()):
            if any(fnmatchcase(f"{name}={value}", pattern) for pattern in patterns.split()):
                raise ConfigurationError(f"recipe: arguments cannot have {name}. {words}")
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
        """The same recipe without techniques."""
        return replace(self, techniques=())

    @property
    def label(self) -> str:
        """The techniques in words, for tables and legends."""
        return " + ".join(sorted(_label(t) for t in self.techniques)) or "baseline"

    @property
    def shape(self) -> Shape:
        """The batches that are trained on: the recipe's own, unless a technique asks for others."""
        shape = Shape(self.effective_batch_size, self.sequence_length, self.steps)
        for entry in self.techniques:
            shape = entry.shape(shape)
        return shape

    def training_arguments(self) -> Arguments:
        """The keyword arguments of `transformers.TrainingArguments` that this recipe decides."""
        shape = self.shape
        arguments: Arguments = {
            "per_device_train_batch_size": shape.sequences,
            "gradient_accumulation_steps": 1,
            "max_steps": shape.steps,
            "seed": self.seed,
        }
        for entry in self.techniques:
            arguments = entry.training_arguments(arguments)
            decided = {*arguments, *(("optim", "optim_args") if Capability.OPTIMIZER in entry.brings else ())}
            for name in sorted(decided & self.arguments.keys()):
                raise ConfigurationError(f"recipe: arguments has {name}, which {entry.name} decides. Drop one of them.")
        return arguments

    def command(self) -> str:
        """The command line that runs this recipe."""
        words = ["python", "-m", "workbench", "run", self.model]
        for name, value in _changed(self, "model", "techniques", "arguments", "callbacks").items():
            words += [flag(name), _written(value)]
        for entry in sorted(self.techniques, key=lambda t: t.name):
            changed = ",".join(f"{name}:{_written(value)}" for name, value in _changed(entry).items())
            words += ["--technique", f"{entry.name}={changed}" if changed else entry.name]
        for name, value in self.arguments.items():
            words += ["--set", f"arguments.{name}={toml(value)}"]
        words += ["--set", f"callbacks={toml(self.callbacks)}"] if self.callbacks else []
        return shlex.join(words)

    def to_toml(self) -> str:
        """A recipe file: the model, and what is not as by default. Inverse of `read`."""
        tables = [("", {"model": self.model, **_changed(self, "techniques", "arguments")})]
        tables += [(f"technique.{t.name}", _changed(t)) for t in sorted(self.techniques, key=lambda t: t.name)]
        tables += [("arguments", dict(self.arguments))] if self.arguments else []
        lines = list[str]()
        for head, settings in tables:
            lines += ["", f"[{head}]"] if head else []
            lines += [f"{name} = {toml(value)}" for name, value in settings.items()]
        return "\n".join([*lines, ""])

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """The recipe in a file. Its own paths are seen from the working directory, not from that of the file.

        Raises ConfigurationError for a file that is no TOML, and as `from_dict`.
        """
        return cls.from_dict(read_toml(Path(path), "recipe", EXAMPLE))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Inverse of `from_dict`."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("techniques", *LATER)}
        later = {name: value for name in LATER if (value := getattr(self, name))}
        later |= {"callbacks": [*self.callbacks]} if self.callbacks else {}
        return {**plain, "techniques": {t.name: t.settings() for t in self.techniques}, **later}

    @classmethod
    def from_dict(cls, data: object, instead: Sequence[Technique] = ()) -> Self:
        """The techniques `instead` take the place of those in the data that have their names.

        Raises ConfigurationError for an unknown field, technique or setting, and for what is no mapping.
        """
        values = named(data, sorted([*(f.name for f in fields(cls)), FILES]), "recipe", "field")
        both = [named(values.pop(key, {}), sorted(REGISTRY), "recipe", FILES) for key in ("techniques", FILES)]
        chosen = {name: each for name, each in merged(*both).items() if name not in {t.name for t in instead}}
        return cls(**values, techniques=(*(REGISTRY[name].given(each) for name, each in chosen.items()), *instead))

    @classmethod
    def parse(cls, values: Mapping[str, str], techniques: Iterable[str] = (), changes: Iterable[str] = ()) -> Self:
        """A recipe from texts, as typed on a command line: fields by name, techniques as `lora=rank:8`, and changes as
        `technique.lora.rank=16`. A model that ends in `.toml` is a recipe file, over which all of them go.

        Raises ConfigurationError for a text that cannot be read, and as the recipe itself does.
        """
        given, data = parse_settings(cls, values, "run"), dict[str, Any]()
        if given.get("model", "").endswith(FILE):
            data = read_toml(Path(given.pop("model")), "recipe", EXAMPLE)
        for change in changes:
            data = merged(data, assigned(change))
        return cls.from_dict(data | given, [*map(parse_technique, techniques)])

    @property
    def id(self) -> str:
        """Twelve hexadecimal digits, equal for equal recipes."""
        canonical = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def recipe_options() -> dict[str, tuple[str, str]]:
    """Of each field that a command line has an option for: the option, and its help."""
    return {
        f.name: (flag(f.name), f"{f.metadata['help']} ({described(f)}; default {_written(f.default)})")
        for f in fields(Recipe)
        if "help" in f.metadata
    }


def flag(field_name: str) -> str:
    """The command line's name of a field; people know some by a shorter one."""
    return {"effective_batch_size": "--batch-size"}.get(field_name, "--" + field_name.replace("_", "-"))


def _written(value: Any) -> str:
    """As the command line reads it back."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _changed(entry: Any, *but: str) -> dict[str, Any]:
    """The settings, of a technique or a recipe, that differ from their defaults; without some."""
    return {f.name: v for f in fields(entry) if f.name not in but and (v := getattr(entry, f.name)) != f.default}


def _label(entry: Technique) -> str:
    changed = ", ".join(f"{name}={value}" for name, value in _changed(entry).items())
    return f"{entry.name}({changed})" if changed else entry.name
