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
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from workbench.errors import ConfigurationError, explained
from workbench.paths import aside, beside, put_in_place, runs_folder
from workbench.recipe import Recipe
from workbench.settings import named, parse_settings
from workbench.techniques import parse_technique
from workbench.texts import readers
from workbench.texts.corpus import load_corpus

if TYPE_CHECKING:
    from datasets import Dataset

LIMIT = 100_000  # characters
CURE = "Paste a recipe of the workbench, TrainingArguments as JSON, or the YAML of LLaMA-Factory or axolotl."
FOREIGN = beside(__file__, "foreign.toml")
OWN = {field.name for field in fields(Recipe)} - {"learning_rate", "seed"} | {"technique"}  # others name these two


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
    data, given = _read(text)
    if isinstance(data.get("recipe"), dict) or data.keys() & OWN:
        own = Recipe.from_dict(data.get("recipe", data))
        unseen = [(f"arguments.{name}", str(value)) for name, value in own.arguments.items()]
        unseen += [("callbacks", f"{name}, whose code a run imports") for name in own.callbacks]
        return Brought(own, "the workbench", unseen, [])  # what no control shows
    known = [len(given.keys() & set(chain(*map(_keys, program["rule"])))) for program in FOREIGN["program"]]
    if not any(known):
        raise ConfigurationError(f"recipe: no setting is known, of {', '.join(given)[:90]!r}. {CURE}")
    program = FOREIGN["program"][known.index(max(known))]
    return _translated(program, given, replace(base or Recipe(), techniques=(), learning_rate=None))


class _NoAliases(yaml.SafeLoader):  # type: ignore[misc]
    """A few aliases, each of several others, can fill the memory."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name): write out what they stand for")
        return super().compose_node(parent, index)


def _read(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings as they are, and their texts."""
    text, tables = text.strip("\ufeff \r\n"), re.search(r"(?m)^[\w.\"-]+\s*=", text[:LIMIT])
    form = "JSON" if text.startswith("{") else "TOML" if tables else "YAML"
    with explained(f"recipe: this cannot be read as {form}", CURE):
        if len(text) > LIMIT:
            raise ValueError(f"it has more than {LIMIT:,} characters")
        read = json.loads(text) if form == "JSON" else tomllib.loads(text) if tables else yaml.load(text, _NoAliases)
        data = named(read, read or (), "recipe")
        return data, _texts(data)


def _texts(data: Mapping[Any, Any], outer: str = "") -> dict[str, str]:
    """By name, `outer.inner` for what is inside of another; "" for none. To YAML `1e-4` is a text anyway."""
    found: dict[str, str] = {}
    for name, value in data.items():
        plain = value if isinstance(value, str) else json.dumps(value, default=str).removesuffix(".0")
        found |= _texts(value, f"{outer}{name}.") if isinstance(value, dict) else {f"{outer}{name}": plain}
    return {name: "" if text == "null" else text.strip() for name, text in found.items()}


def _keys(rule: Mapping[str, Any]) -> list[str]:
    """The settings that a rule is about."""
    when = (key for key, texts in rule.get("when", {}).items() if not texts.startswith("!"))
    return list(dict.fromkeys(chain(when, *rule.get("set", {}).values())))


def _translated(program: Mapping[str, Any], given: Mapping[str, str], recipe: Recipe) -> Brought:
    texts, understood, used = {**program["defaults"], **given}, [], set()
    for rule in program["rule"]:
        keys = [key for key in _keys(rule) if texts.get(key)]
        if keys and all(_like(texts.get(key, "").lower(), pattern) for key, pattern in rule.get("when", {}).items()):
            theirs = ", ".join(f"{key}: {texts[key]:.90}" + ("" if key in given else " (its default)") for key in keys)
            try:
                recipe, words = _applied(rule, texts, recipe)
            except ValueError as error:
                raise ConfigurationError(f"{program['title']}: {theirs}: {error}") from None
            understood.append((theirs, words))
            used.update(keys)
    rest = [key for key, text in given.items() if key not in used and not _like(text.lower(), FOREIGN["off"])]
    reasons = {**program["reasons"], **FOREIGN["reasons"], "*": "not known here"}
    why = {key: next(words for names, words in reasons.items() if _like(key, names)) for key in rest}
    return Brought(recipe, program["title"], understood, [(f"{key}: {given[key]:.90}", why[key]) for key in rest])


def _applied(rule: Mapping[str, Any], texts: Mapping[str, str], recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with what a rule sets, and that in words."""
    found = {name: _value(name, [texts.get(key, "") for key in keys]) for name, keys in rule.get("set", {}).items()}
    values = {name: text for name, text in found.items() if text} | rule.get("fixed", {})
    words = ",".join(f"{name}:{text}" for name, text in values.items())
    if "technique" in rule:
        words = f"{rule['technique']}={words}".rstrip("=")
        recipe |= parse_technique(words)
    else:
        recipe = replace(recipe, **parse_settings(Recipe, values, "recipe"))
    return recipe, "; ".join(filter(None, (words, rule.get("says"))))


def _value(name: str, texts: list[str]) -> str:
    """The text of a setting: in our words; of several numbers the product. Raises ValueError for no number."""
    texts = [*filter(None, texts)]
    if words := FOREIGN["words"].get(name):
        ours = "+".join(words.get(part, part) for part in re.findall(r"[\w.-]+", " ".join(texts)))
        return "+".join(sorted({*re.findall(r"[^+]+", ours)}))
    return str(math.prod(map(int, texts))) if len(texts) > 1 else "".join(texts)


def _like(text: str, patterns: str) -> bool:
    """Whether it matches one of the patterns, or, after a !, none."""
    return any(fnmatchcase(text, one) for one in patterns.removeprefix("!").split("|")) != patterns.startswith("!")


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
    if missing := [name for name in kept if name not in names]:
        raise readers.refusal(f"the data set has no column {missing[0]!r}; it has {', '.join(names)}. Name one.")
    with aside(runs_folder() / "texts", "corpus: the data set", ".parquet") as part:
        renamed = {} if readers.column_of(kept) == ",".join(kept) else {column: "text"}
        dataset.select_columns(kept).rename_columns(renamed).to_parquet(part)
        return str(put_in_place(part, f"{load_corpus(str(part)).sha256[:16]}.parquet"))
