"""Recipes, and other programs' settings, with what was understood of them and what not; and data sets in memory.

What other programs' settings mean here is written in `foreign.toml`, and nowhere else.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from workbench.base.errors import ConfigurationError, explained
from workbench.base.paths import aside, beside, put_in_place, runs_folder
from workbench.base.settings import named, parse_settings
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.texts import readers
from workbench.texts.corpus import load_corpus

if TYPE_CHECKING:
    from datasets import Dataset

LIMIT = 100_000  # characters
CURE = "Paste a recipe of the workbench, TrainingArguments as JSON, or the YAML of LLaMA-Factory or axolotl."
FOREIGN = beside(__file__, "foreign.toml")
OURS = {field.name for field in fields(Recipe)} - {"learning_rate", "seed"} | {"technique"}  # others name these two
ASSIGNMENT = re.compile(r"(?m)^[\w.\"-]+\s*=")  # of TOML


class Brought(NamedTuple):
    """A recipe, and what became of each setting of the text. What is switched off there is not mentioned.

    Attributes:
        program: whose settings they were.
        understood: their settings, and what that is here.
        left_out: their setting, and why it has no part in the recipe; "" for what does not change the peak.
    """

    recipe: Recipe
    program: str
    understood: list[tuple[str, str]]
    left_out: list[tuple[str, str]]


def read_settings(text: str, base: Recipe | None = None) -> Brought:
    """Read a recipe (TOML, JSON), a record, or other programs' settings (JSON, YAML).

    Args:
        base: gives what others' settings do not say: the text, and with TrainingArguments the model.

    Raises:
        ConfigurationError: it cannot be read, names nothing that is known, or has a value that a recipe refuses.
    """
    data, texts = _read(text)
    if isinstance(data.get("recipe"), dict) or data.keys() & OURS:
        recipe = Recipe.from_dict(data.get("recipe", data))
        unseen = [(f"arguments.{name}", str(value)) for name, value in recipe.arguments.items()]
        unseen += [("callbacks", f"{name}, whose code a run imports") for name in recipe.callbacks]
        return Brought(recipe, "the workbench", unseen, [])  # what no control shows
    settings_known_to = []
    for program in FOREIGN["program"]:
        names = {name for rule in program["rule"] for name in _names_of(rule)}
        settings_known_to.append(len(names & texts.keys()))
    if not any(settings_known_to):
        raise ConfigurationError(f"recipe: no setting is known, of {', '.join(texts)[:90]!r}. {CURE}")
    # Programs share some names: the text is of the one that knows most of them.
    likeliest = settings_known_to.index(max(settings_known_to))
    unsaid = replace(base or Recipe(), techniques=(), learning_rate=None)
    return _translated(FOREIGN["program"][likeliest], texts, unsaid)


class _NoAliases(yaml.SafeLoader):  # type: ignore[misc]
    """A few aliases, each of several others, can fill the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name): write out what they stand for")
        return super().compose_node(parent, index)


def _read(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings as they are, and their texts."""
    text = text.strip("\ufeff \r\n")
    form = "YAML"
    if text.startswith("{"):
        form = "JSON"
    elif ASSIGNMENT.search(text[:LIMIT]):
        form = "TOML"
    with explained(f"recipe: this cannot be read as {form}", CURE):
        if len(text) > LIMIT:
            raise ValueError(f"it has more than {LIMIT:,} characters")
        settings = _parsed(text, form)
        data = named(settings, settings or (), "recipe")
        return data, _texts(data)


def _parsed(text: str, form: str) -> Any:
    if form == "JSON":
        return json.loads(text)
    if form == "TOML":
        return tomllib.loads(text)
    return yaml.load(text, _NoAliases)


def _texts(data: Mapping[Any, Any], outer: str = "") -> dict[str, str]:
    """By name, `outer.inner` for what is inside of another; "" for none. To YAML `1e-4` is a text anyway."""
    texts: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            texts |= _texts(value, f"{outer}{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str).removesuffix(".0")
        texts[f"{outer}{name}"] = "" if text == "null" else text.strip()
    return texts


def _names_of(rule: Mapping[str, Any]) -> list[str]:
    """The settings that a rule is about."""
    names = [name for name, patterns in rule.get("when", {}).items() if not patterns.startswith("!")]
    for parts in rule.get("set", {}).values():
        names += parts
    return list(dict.fromkeys(names))


def _translated(program: Mapping[str, Any], texts: Mapping[str, str], recipe: Recipe) -> Brought:
    """The recipe that a program's settings mean.

    Args:
        texts: of the settings, by name.
        recipe: has what they do not say.
    """
    with_defaults = {**program["defaults"], **texts}
    understood = []
    used = set()
    for rule in program["rule"]:
        names = [name for name in _names_of(rule) if with_defaults.get(name)]
        # A rule about settings that are all absent would only say what their program does anyway.
        if not names or not _holds(rule, with_defaults):
            continue
        stated = [f"{name}: {with_defaults[name]:.90}" + ("" if name in texts else " (its default)") for name in names]
        theirs = ", ".join(stated)
        try:
            recipe, ours = _applied(rule, with_defaults, recipe)
        except ValueError as error:
            raise ConfigurationError(f"{program['title']}: {theirs}: {error}") from None
        understood.append((theirs, ours))
        used.update(names)
    reasons = {**program["reasons"], **FOREIGN["reasons"]}
    left_out = []
    for name, text in texts.items():
        if name not in used and not _like(text.lower(), FOREIGN["off"]):
            left_out.append((f"{name}: {text:.90}", _reason_for(name, reasons)))
    return Brought(recipe, program["title"], understood, left_out)


def _holds(rule: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    """Whether every setting under `when` has one of its texts."""
    return all(_like(texts.get(name, "").lower(), patterns) for name, patterns in rule.get("when", {}).items())


def _reason_for(name: str, reasons: Mapping[str, str]) -> str:
    """Why a setting has no part in the recipe, by the first patterns that it is like."""
    for patterns, reason in reasons.items():
        if _like(name, patterns):
            return reason
    return "not known here"


def _applied(rule: Mapping[str, Any], texts: Mapping[str, str], recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with what a rule sets, and that in words."""
    values = {}
    for field, names in rule.get("set", {}).items():
        value = _value(field, [texts.get(name, "") for name in names])
        if value:
            values[field] = value
    values |= rule.get("fixed", {})
    ours = ",".join(f"{field}:{value}" for field, value in values.items())
    if "technique" in rule:
        ours = f"{rule['technique']}={ours}".rstrip("=")  # as on the command line
        recipe |= parse_technique(ours)
    else:
        recipe = replace(recipe, **parse_settings(Recipe, values, "recipe"))
    if ours and "says" in rule:
        return recipe, f"{ours}; {rule['says']}"
    return recipe, ours or rule.get("says", "")


def _value(field: str, texts: list[str]) -> str:
    """The text of a setting: in our words; of several numbers the product. Raises ValueError for no number."""
    texts = [text for text in texts if text]
    translations = FOREIGN["words"].get(field)
    if translations:
        parts = [translations.get(part, part) for part in re.findall(r"[\w.-]+", " ".join(texts))]
        ours = {part for part in "+".join(parts).split("+") if part}
        return "+".join(sorted(ours))
    return str(math.prod(map(int, texts))) if len(texts) > 1 else "".join(texts)


def _like(text: str, patterns: str) -> bool:
    """Whether it matches one of the patterns, or, after a !, none."""
    matches = any(fnmatchcase(text, pattern) for pattern in patterns.removeprefix("!").split("|"))
    return not matches if patterns.startswith("!") else matches


def keep(dataset: "Dataset", column: str = "") -> str:
    """Write the texts or conversations of a `datasets.Dataset` beside the records; returns their name for a recipe.

        Recipe(corpus=keep(dataset, "review"))

    The name is made of the text's hash: the same texts give the same recipe.

    Raises:
        ConfigurationError: no such column, not a Dataset, or no text in it.
        UnavailableError: the disk is full, or the folder cannot be written to.
    """
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list) or not hasattr(dataset, "__len__"):
        cure = "Of several splits give one, as dataset['train']; read a stream first: Dataset.from_list(list(stream))."
        raise readers.refusal(f"a datasets.Dataset is needed, got a {type(dataset).__name__}. {cure}")
    kept = (column or readers.column_of(names)).split(",")
    for name in kept:
        if name not in names:
            raise readers.refusal(f"the data set has no column {name!r}; it has {', '.join(names)}. Name one.")
    with aside(runs_folder() / "texts", "corpus: the data set", ".parquet") as part:
        renamed = {} if readers.column_of(kept) == ",".join(kept) else {column: "text"}
        dataset.select_columns(kept).rename_columns(renamed).to_parquet(part)
        return str(put_in_place(part, f"{load_corpus(str(part)).sha256[:16]}.parquet"))
