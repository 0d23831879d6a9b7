"""The translation of other programs' settings: into the names of Hugging Face's classes, and from there into a recipe.

All rules stand in `foreign.toml`; no setting is named here.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import parse_settings
from workbench.export.owners import classes_of, convert, owner, title_with_version
from workbench.export.pasted import INSTEAD, Section, Unwritten
from workbench.export.whose import FOREIGN, PROGRAMS, flatten, matches_any
from workbench.recipe import DECIDED, Recipe
from workbench.techniques import parse_technique

OFF = ("", "false", "no", "none", "null", "off", "0", "[]", "{}")  # texts of a setting that is switched off
NAMES = re.compile(r"[\w.\-,\s\"'\[\]]*")  # matches a list of matrices' names, and no pattern of names

Table = Mapping[str, Any]  # a table of foreign.toml, or settings by name
Texts = Mapping[str, str]


@dataclass
class ImportedRecipe:
    """A recipe from other programs' settings, with one of three answers to each of them.

    Attributes:
        program: the program whose settings they were, with the version whose fields were read.
        understood: pairs (setting, what it is in the recipe).
        harmless: pairs (setting, why it has no part in a prediction).
        not_understood: pairs (setting, what is missing for it).
    """

    recipe: Recipe
    program: str
    understood: list[tuple[str, str]] = field(default_factory=list)
    harmless: list[tuple[str, str]] = field(default_factory=list)
    not_understood: list[tuple[str, str]] = field(default_factory=list)

    @property
    def without(self) -> str:
        """The words that a headline needs beside a prediction of the recipe; "" if all settings are understood."""
        names = list(dict.fromkeys(theirs.partition(":")[0] for theirs, _ in self.not_understood))
        if not names:
            return ""
        settings = "this setting does" if len(names) == 1 else f"these {len(names)} settings do"
        return f"without what {settings}: {', '.join(names)}"


class Settings:
    """The settings of a file, or of the calls of a script. A stated name is the program's own; Hugging Face's names are
    those of its classes' fields. The text of a value is as YAML writes it.

    Attributes:
        titles: the programs, with their versions.
        stated: values by stated name, of the field's type if a class has the field.
        stated_texts: texts by stated name, `outer.inner` for what is inside of another, without what only a run knows.
        defaults: texts of the defaults, by Hugging Face's name.
        texts: texts of all settings, stated or default, by Hugging Face's name.
        origins: by Hugging Face's name, the stated names that it comes from.
        current: Hugging Face's name by stated name.
    """

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.stated: dict[str, Any] = {}
        self.stated_texts: dict[str, str] = {}
        self.defaults: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.origins: defaultdict[str, set[str]] = defaultdict(set)
        self.current: dict[str, str] = {}

    def add(self, program: str, section: Section) -> None:
        """Add the settings of a section, over the defaults of its classes and of its program.

        Raises ConfigurationError: a value is not of its field's type, or an old name and its successor disagree.
        """
        table = PROGRAMS[program]
        package = table.get("package", "transformers")
        title = title_with_version(table["title"], table.get("package", ""))
        self.titles.append(title)
        types: dict[str, Any] = {}
        defaults: dict[str, str] = {}
        for name in classes_of(table, section):
            fields = owner(package, name)
            types = fields.types | types
            for field_name, value in fields.defaults.items():
                text = plain_text(value)
                if text:  # An empty default of a newer name would hide the default of the older one.
                    defaults.setdefault(current_name(field_name, table), text)
        defaults |= table.get("defaults", {})
        self.defaults |= defaults
        stated = {}
        for name, value in section.settings.items():
            if name.isdigit():  # The argument of a call has no name, but a position.
                name = [*types, *table.get("names", {})][int(name)]
            if "only" in table and not matches_any(name, table["only"]):
                continue
            current = FOREIGN["renamed"].get(name, [name])[0]
            value = FOREIGN["renamed_values"].get(f"{current}={value}", [value])[0]
            if current in types and not isinstance(value, Unwritten):
                value = convert(value, types[current], f"{title}: {name}")
            stated[name] = value
        self.stated |= stated
        self._rename(table, stated, defaults)

    def _rename(self, table: Table, stated: Table, defaults: Texts) -> None:
        """Write a section's settings in Hugging Face's names, and add those that its program's values imply."""
        texts = {}
        for name, value in flatten(stated).items():
            if not isinstance(value, Unwritten):
                texts[name] = plain_text(value)
        self.stated_texts |= texts
        current_texts: dict[str, str] = {}
        for name, text in texts.items():
            current = current_name(name, table)
            if current_texts.setdefault(current, text) != text:
                raise ConfigurationError(f"recipe: {name} is another name of {current}, and they differ. Keep one.")
            self.origins[current].add(name)
            self.current[name] = current
        before = {**defaults, **texts}
        for conditions, implied in {**FOREIGN["values"], **table.get("values", {})}.items():
            wanted = dict(condition.split("=") for condition in conditions.split())
            if not all_hold(wanted, before):
                continue
            current_texts |= implied
            origin = conditions.partition("=")[0]
            if origin in texts:
                for name in implied:
                    self.origins[name].add(origin)
                    self.current[origin] = name
        self.texts |= {**defaults, **current_texts}

    def translate(self, recipe: Recipe) -> ImportedRecipe:
        """Return the recipe with what the settings mean. Raises ConfigurationError: a value or a setting is refused."""
        imported = ImportedRecipe(recipe, ", ".join(dict.fromkeys(self.titles)))
        used: set[str] = set()
        for rule in FOREIGN["rule"]:
            names = [name for name in names_of(rule) if self.texts.get(name)]
            if names and all_hold(rule.get("when", {}), self.texts):
                self._follow(rule, names, imported)
                for name in names:
                    used |= self.origins[name]
        for name, value in self.stated.items():
            parts = flatten({name: value})
            if not used & parts.keys():
                parts = {name: value}  # No rule is about a part of it, so it is answered in one piece.
            for part_name, part in parts.items():
                if part_name not in used:
                    self._answer(part_name, part, imported)
        return imported

    def _follow(self, rule: Table, names: list[str], imported: ImportedRecipe) -> None:
        """Change the recipe by a rule, and answer the settings that the rule is about."""
        shown = []
        for name in names:
            origins = sorted(f"{origin}: {self.stated_texts[origin]:.90}" for origin in self.origins[name])
            shown += origins or [f"{name}: {self.texts[name]:.90} (its default)"]
        theirs = ", ".join(dict.fromkeys(shown))
        try:
            if "refuses" in rule:
                raise ValueError(f"{rule['refuses']}. {INSTEAD}")
            imported.recipe, ours = apply_rule(rule, self.texts, imported.recipe)
        except ValueError as error:
            raise ConfigurationError(f"{imported.program}: {theirs}: {error}") from None
        if "lacks" in rule:
            imported.not_understood.append((theirs, f"{ours}; {rule['lacks']}".removeprefix("; ")))
        else:
            imported.understood.append((theirs, ours))

    def _answer(self, name: str, value: Any, imported: ImportedRecipe) -> None:
        """Answer a setting that no rule is about: one of TrainingArguments goes into the recipe."""
        text = plain_text(value)
        current = self.current.get(name, name)
        theirs = f"{name}: {text:.90}"
        if name in FOREIGN["renamed"]:
            theirs = f"{name} ({current} since {FOREIGN['renamed'][name][1]}): {text:.90}"
        if text == self.defaults.get(current) or (current not in self.defaults and text.lower() in OFF):
            return  # It changes nothing.
        if isinstance(value, bool):
            value = self.texts.get(current, value)
        types = owner("transformers", "TrainingArguments").types
        decided = []
        for patterns, instead in DECIDED.items():
            if matches_any(f"{current}={text}".replace(" ", ""), patterns):
                decided.append(instead)
        harmless = reason_for(current, text, FOREIGN["harmless"])
        if harmless:
            imported.harmless.append((theirs, harmless))
        elif isinstance(value, Unwritten):
            imported.not_understood.append((theirs, "its value is known only when it runs; the default is taken"))
        elif current in types and not decided and "=" not in text:
            argument = {current: convert(value, types[current], f"{imported.program}: {name}")}
            imported.recipe = replace(imported.recipe, arguments={**imported.recipe.arguments, **argument})
            imported.understood.append((theirs, f"arguments.{current} = {plain_text(argument[current]):.90}"))
        else:
            reason = reason_for(current, text, FOREIGN["reasons"]) or " ".join(decided) or "not known here"
            imported.not_understood.append((theirs, reason))


def current_name(name: str, table: Table) -> str:
    """Return Hugging Face's name of a program's setting, `outer.inner` for one that is inside of another."""
    names = table.get("names", {})
    if name in names:
        return str(names[name])
    outer, dot, inner = name.partition(".")
    return f"{FOREIGN['renamed'].get(outer, [outer])[0]}{dot}{inner}"


def plain_text(value: Any) -> str:
    """Return a value as YAML writes it; "" for None."""
    text = value if isinstance(value, str) else json.dumps(value, default=str).removesuffix(".0")
    return "" if text == "null" else text.strip()


def names_of(rule: Table) -> list[str]:
    """List the settings that a rule is about, each once, in the rule's order."""
    names: dict[str, None] = {}
    for name, patterns in rule.get("when", {}).items():
        if "refuses" in rule or not patterns.startswith("!"):
            names[name] = None
    for parts in rule.get("set", {}).values():
        names |= dict.fromkeys(parts)
    return list(names)


def all_hold(conditions: Texts, texts: Texts) -> bool:
    """Whether each text matches one of the patterns of its name; or none of them, if the patterns begin with a `!`."""
    for name, patterns in conditions.items():
        text = texts.get(name, "").lower()
        alternatives = patterns.removeprefix("!").lower().split("|")
        matches = any(fnmatchcase(text, pattern) for pattern in alternatives)
        if matches == patterns.startswith("!"):
            return False
    return True


def reason_for(name: str, text: str, reasons: Texts) -> str:
    """Return the first reason whose patterns match a setting's name, or `name=text`; "" if there is none."""
    for reason, patterns in reasons.items():
        if matches_any(name, patterns) or matches_any(f"{name}={text}", patterns):
            return reason
    return ""


def apply_rule(rule: Table, texts: Texts, recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with what a rule sets, and the same in words."""
    values = {}
    for name, parts in rule.get("set", {}).items():
        value = value_of(name, [texts[part] for part in parts if texts.get(part)])
        if value:
            values[name] = value
    values |= rule.get("fixed", {})
    ours = ",".join(f"{name}:{value}" for name, value in values.items())
    if "technique" in rule:
        ours = f"{rule['technique']}={ours}".rstrip("=")  # The command line has this form.
        recipe |= parse_technique(ours)
    else:
        recipe = replace(recipe, **parse_settings(Recipe, values, "recipe"))
    if ours and "says" in rule:
        return recipe, f"{ours}; {rule['says']}"
    return recipe, ours or rule.get("says", "")


def value_of(name: str, texts: list[str]) -> str:
    """Return the value of a recipe's setting for the texts of other settings.

    It is their translation, if FOREIGN["words"] has words for this setting; "" for a pattern, which has none. Otherwise
    it is the one text as it is, or the product of several numbers.

    Raises ValueError: one of several texts is no whole number.
    """
    translations = FOREIGN["words"].get(name)
    if translations:
        if not all(NAMES.fullmatch(text) for text in texts):
            return ""
        parts = {translations.get(part, part) for part in re.findall(r"[\w.-]+", " ".join(texts))}
        return "+".join(sorted(parts))
    if len(texts) < 2:
        return "".join(texts)
    for text in texts:
        if not text.isdecimal():
            raise ValueError(f"{text!r} is no whole number of at least 1.")
    return str(math.prod(map(int, texts)))
