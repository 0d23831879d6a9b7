"""A recipe: what to fine-tune, on which text, with which techniques. Plain data, validated, comparable."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any, Self

from workbench.errors import ConfigurationError, brief
from workbench.settings import check_settings, described, named, parse_settings, setting
from workbench.techniques import REGISTRY, Technique, parse_technique
from workbench.techniques.base import Arguments, Shape


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a fine-tuning run.

    Two runs compare when their recipes differ in the techniques alone. Techniques are kept in the order in which they
    act (`Stage`), so recipes that mean the same are equal; `recipe | Lora(rank=8)` adds one.

    Raises:
        ConfigurationError: a value out of range, a technique given twice, techniques that exclude each other, a batch
            that a technique cannot split.
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
        self.training_arguments()

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
        return arguments

    def command(self) -> str:
        """The command line that runs this recipe."""
        words = ["python", "-m", "workbench", "run", self.model]
        for field in fields(self):
            value = getattr(self, field.name)
            if "help" in field.metadata and field.name != "model" and value != field.default:
                words += [flag(field.name), _written(value)]
        for entry in sorted(self.techniques, key=lambda t: t.name):
            changed = ",".join(f"{name}:{_written(value)}" for name, value in _changed(entry).items())
            words += ["--technique", f"{entry.name}={changed}" if changed else entry.name]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Inverse of `from_dict`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "techniques"}
        if self.evaluation_batch_size is None:
            del plain["evaluation_batch_size"]  # the ids of records from before it came stay the same
        return {**plain, "techniques": {t.name: t.settings() for t in self.techniques}}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Raises ConfigurationError for an unknown field, technique or setting, and for what is no mapping."""
        values = named(data, sorted(field.name for field in fields(cls)), "recipe", "field")
        chosen = named(values.get("techniques", {}), sorted(REGISTRY), "recipe", "technique")
        return cls(**values | {"techniques": tuple(REGISTRY[name].given(each) for name, each in chosen.items())})

    @classmethod
    def parse(cls, values: Mapping[str, str], techniques: Iterable[str] = ()) -> Self:
        """A recipe from texts, as typed on a command line: fields by name, techniques as `lora=rank:8`.

        Raises ConfigurationError for a text that cannot be read, and as the recipe itself does.
        """
        return cls(**parse_settings(cls, values, "run"), techniques=tuple(map(parse_technique, techniques)))

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


def _changed(entry: Technique) -> dict[str, Any]:
    """The settings that differ from their defaults."""
    return {f.name: value for f in fields(entry) if (value := getattr(entry, f.name)) != f.default}  # type: ignore[arg-type]


def _label(entry: Technique) -> str:
    changed = ", ".join(f"{name}={value}" for name, value in _changed(entry).items())
    return f"{entry.name}({changed})" if changed else entry.name
