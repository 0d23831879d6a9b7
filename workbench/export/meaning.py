"""What other programs' settings mean: first in the names of Hugging Face's classes, and from there in a recipe."""

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
from workbench.export.owners import checked, classes_of, owner, versioned
from workbench.export.pasted import INSTEAD, Section, Unwritten
from workbench.export.whose import FOREIGN, PROGRAMS, flattened, like
from workbench.recipe import DECIDED, Recipe
from workbench.techniques import parse_technique

OFF = ("", "false", "no", "none", "null", "off", "0", "[]", "{}")
NAMES = re.compile(r"[\w.\-,\s\"'\[\]]*")  # of matrices, and no pattern of them


@dataclass
class Brought:
    """A recipe, and what became of each setting of the text: one of three answers.

    Attributes:
        program: whose settings they were, with the version whose fields were read.
        understood: their settings, and what that is here.
        harmless: their settings, and why they have no part in a prediction.
        not_understood: their settings, and what is missing for them.
    """

    recipe: Recipe
    program: str
    understood: list[tuple[str, str]] = field(default_factory=list)
    harmless: list[tuple[str, str]] = field(default_factory=list)
    not_understood: list[tuple[str, str]] = field(default_factory=list)

    @property
    def without(self) -> str:
        """What a headline has to say beside a prediction of the recipe; empty where all is understood."""
        names = list(dict.fromkeys(theirs.partition(":")[0] for theirs, _ in self.not_understood))
        if not names:
            return ""
        settings = "this setting does" if len(names) == 1 else f"these {len(names)} settings do"
        return f"without what {settings}: {', '.join(names)}"


class Settings:
    """Settings of a file, or of the calls of a script, in the names of Hugging Face's classes.

    Attributes:
        stated: each as it stands there, of its field's type where a class has it.
        stated_texts: the same as texts, what is inside of another by `outer.inner`, without what only a run would know.
        defaults: texts of what is not stated, by Hugging Face's names.
        texts: of all, by Hugging Face's names.
        origins: by Hugging Face's names, the stated ones that they come from.
        current: Hugging Face's names, by the stated ones.
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
        """Take what a section has, over the defaults of its classes and of its program.

        Raises ConfigurationError: a value is not of its field's type, or an old name and its successor disagree.
        """
        table = PROGRAMS[program]
        package = table.get("package", "transformers")
        title = versioned(table["title"], table.get("package", ""))
        self.titles.append(title)
        types: dict[str, Any] = {}
        defaults: dict[str, str] = {}
        for name in classes_of(table, section):
            fields = owner(package, name)
            types = fields.types | types
            for field_name, value in fields.defaults.items():
                text = plain_text(value)
                if text:  # else the successor of an older name would hide its default
                    defaults.setdefault(in_their_names(field_name, table), text)
        defaults |= table.get("defaults", {})
        self.defaults |= defaults
        stated = {}
        for name, value in section.settings.items():
            if name.isdigit():  # an argument without a name
                name = [*types, *table.get("names", {})][int(name)]
            if "only" in table and not like(name, table["only"]):
                continue
            current = FOREIGN["renamed"].get(name, [name])[0]
            value = FOREIGN["renamed_values"].get(f"{current}={value}", [value])[0]
            if current in types and not isinstance(value, Unwritten):
                value = checked(value, types[current], f"{title}: {name}")
            stated[name] = value
        self.stated |= stated
        self._translate(table, stated, defaults)

    def _translate(self, table: Mapping[str, Any], stated: Mapping[str, Any], defaults: Mapping[str, str]) -> None:
        texts = {}
        for name, value in flattened(stated).items():
            if not isinstance(value, Unwritten):
                texts[name] = plain_text(value)
        self.stated_texts |= texts
        current_texts: dict[str, str] = {}
        for name, text in texts.items():
            current = in_their_names(name, table)
            if current_texts.setdefault(current, text) != text:
                raise ConfigurationError(f"recipe: {name} is another name of {current}, and they differ. Keep one.")
            self.origins[current].add(name)
            self.current[name] = current
        there = {**defaults, **texts}
        for conditions, gifts in {**FOREIGN["values"], **table.get("values", {})}.items():
            wanted = dict(condition.split("=") for condition in conditions.split())
            if not all_hold(wanted, there):
                continue
            current_texts |= gifts
            origin = conditions.partition("=")[0]
            if origin in texts:
                for name in gifts:
                    self.origins[name].add(origin)
                    self.current[origin] = name
        self.texts |= {**defaults, **current_texts}

    def translated(self, recipe: Recipe) -> Brought:
        """The recipe that they mean. Raises ConfigurationError: a value is refused, or what it is for."""
        brought = Brought(recipe, ", ".join(dict.fromkeys(self.titles)))
        used: set[str] = set()
        for rule in FOREIGN["rule"]:
            names = [name for name in names_of(rule) if self.texts.get(name)]
            if names and all_hold(rule.get("when", {}), self.texts):
                self._apply(rule, names, brought)
                for name in names:
                    used |= self.origins[name]
        for name, value in self.stated.items():
            parts = flattened({name: value})
            if not used & parts.keys():
                parts = {name: value}  # answered in one piece
            for part_name, part in parts.items():
                if part_name not in used:
                    self._answer(part_name, part, brought)
        return brought

    def _apply(self, rule: Mapping[str, Any], names: list[str], brought: Brought) -> None:
        """Do what a rule says, and say it."""
        shown = []
        for name in names:
            origins = sorted(f"{origin}: {self.stated_texts[origin]:.90}" for origin in self.origins[name])
            shown += origins or [f"{name}: {self.texts[name]:.90} (its default)"]
        theirs = ", ".join(dict.fromkeys(shown))
        try:
            if "refuses" in rule:
                raise ValueError(f"{rule['refuses']}. {INSTEAD}")
            brought.recipe, ours = applied(rule, self.texts, brought.recipe)
        except ValueError as error:
            raise ConfigurationError(f"{brought.program}: {theirs}: {error}") from None
        if "lacks" in rule:
            brought.not_understood.append((theirs, f"{ours}; {rule['lacks']}".removeprefix("; ")))
        else:
            brought.understood.append((theirs, ours))

    def _answer(self, name: str, value: Any, brought: Brought) -> None:
        """What becomes of a setting that no rule is about."""
        text = plain_text(value)
        current = self.current.get(name, name)
        theirs = f"{name}: {text:.90}"
        if name in FOREIGN["renamed"]:
            theirs = f"{name} ({current} since {FOREIGN['renamed'][name][1]}): {text:.90}"
        if text == self.defaults.get(current) or (current not in self.defaults and text.lower() in OFF):
            return  # as it would be without
        if isinstance(value, bool):
            value = self.texts.get(current, value)
        types = owner("transformers", "TrainingArguments").types
        decided = []
        for patterns, instead in DECIDED.items():
            if like(f"{current}={text}".replace(" ", ""), patterns):
                decided.append(instead)
        harmless = reason_for(current, text, FOREIGN["harmless"])
        if harmless:
            brought.harmless.append((theirs, harmless))
        elif isinstance(value, Unwritten):
            brought.not_understood.append((theirs, "its value is known only when it runs; the default is taken"))
        elif current in types and not decided and "=" not in text:
            argument = {current: checked(value, types[current], f"{brought.program}: {name}")}
            brought.recipe = replace(brought.recipe, arguments={**brought.recipe.arguments, **argument})
            brought.understood.append((theirs, f"arguments.{current} = {plain_text(argument[current]):.90}"))
        else:
            why = reason_for(current, text, FOREIGN["reasons"]) or " ".join(decided) or "not known here"
            brought.not_understood.append((theirs, why))


def in_their_names(name: str, table: Mapping[str, Any]) -> str:
    """Hugging Face's name of a setting, with what it is inside of."""
    names = table.get("names", {})
    if name in names:
        return str(names[name])
    outer, dot, inner = name.partition(".")
    return f"{FOREIGN['renamed'].get(outer, [outer])[0]}{dot}{inner}"


def plain_text(value: Any) -> str:
    """A value as YAML would have it; "" for none."""
    text = value if isinstance(value, str) else json.dumps(value, default=str).removesuffix(".0")
    return "" if text == "null" else text.strip()


def names_of(rule: Mapping[str, Any]) -> list[str]:
    """The settings that a rule is about."""
    names: dict[str, None] = {}  # once, and in order
    for name, patterns in rule.get("when", {}).items():
        if "refuses" in rule or not patterns.startswith("!"):
            names[name] = None
    for parts in rule.get("set", {}).values():
        names |= dict.fromkeys(parts)
    return list(names)


def all_hold(conditions: Mapping[str, str], texts: Mapping[str, str]) -> bool:
    """Whether each text matches one of the patterns of its name, or, where these begin with a !, none."""
    for name, patterns in conditions.items():
        text = texts.get(name, "").lower()
        alternatives = patterns.removeprefix("!").lower().split("|")
        matches = any(fnmatchcase(text, pattern) for pattern in alternatives)
        if matches == patterns.startswith("!"):
            return False
    return True


def reason_for(name: str, text: str, reasons: Mapping[str, str]) -> str:
    """The first whose patterns are like the setting's name, or like name=value."""
    for reason, patterns in reasons.items():
        if like(name, patterns) or like(f"{name}={text}", patterns):
            return reason
    return ""


def applied(rule: Mapping[str, Any], texts: Mapping[str, str], recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with what a rule sets, and that in words."""
    values = {}
    for name, parts in rule.get("set", {}).items():
        value = value_of(name, [texts[part] for part in parts if texts.get(part)])
        if value:
            values[name] = value
    values |= rule.get("fixed", {})
    ours = ",".join(f"{name}:{value}" for name, value in values.items())
    if "technique" in rule:
        ours = f"{rule['technique']}={ours}".rstrip("=")  # as on the command line
        recipe |= parse_technique(ours)
    else:
        recipe = replace(recipe, **parse_settings(Recipe, values, "recipe"))
    if ours and "says" in rule:
        return recipe, f"{ours}; {rule['says']}"
    return recipe, ours or rule.get("says", "")


def value_of(name: str, texts: list[str]) -> str:
    """The text of a setting: in our words; of several numbers the product. Raises ValueError for no number."""
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
