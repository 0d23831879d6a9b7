"""What people paste as settings: JSON, YAML, TOML, a command line, or calls in a Python script, which is never run."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from workbench.base.errors import explained

INSTEAD = "Run its own script on a card in software: workbench emulate --gpu CARD -- python SCRIPT"
CURE = (
    "Paste a recipe of the workbench, TrainingArguments, a command line, calls of a script, "
    "or a file of TRL, PEFT, accelerate, DeepSpeed, LLaMA-Factory or axolotl."
)
LIMIT = 100_000  # characters
ASSIGNMENT = re.compile(r"(?m)^[\w.\"-]+\s*=")  # of TOML
CALL = re.compile(r"\b(\w*(Config|Arguments|Trainer)|from_pretrained|FastLanguageModel\.\w+)\s*\(")
OPTION = re.compile(r"(?:^|\s)--[A-Za-z]")
FILLED_IN = re.compile(r"\$[\w{(]")  # by a shell
COMMENT = re.compile(r"(?m)(?:^|\s)#.*|`#[^`]*`")  # the second inside a command of several lines
TO_ANOTHER = re.compile(r"[0-9&]*[<>]|[|;&]+$")  # where a command's own words end
BY_NAME = ("torch", "TaskType")  # modules whose attributes are known by their own names


class Unwritten(str):
    """The text of a value that only a run would know."""


class Section(NamedTuple):
    """Settings of one class of a script, or of a whole file.

    Attributes:
        owner: the name of the class that is called; empty for a file.
        before_options: of a command, what stands before its options; None of others.
    """

    owner: str
    settings: dict[str, Any]
    before_options: tuple[str, ...] | None = None


def read_sections(text: str) -> list[Section]:
    """The settings in a text. Raises ConfigurationError: it is none of these forms, or names a setting twice."""
    text = text.strip("\ufeff \r\n")
    form = form_of(text[:LIMIT])
    with explained(f"recipe: this cannot be read as {form}", CURE):
        if len(text) > LIMIT:
            raise ValueError(f"it has more than {LIMIT:,} characters")
        if form == "Python":
            return calls(text)
        if form == "a command":
            return [command(text)]
        settings = PARSERS[form](text)
        if not isinstance(settings, dict):
            raise ValueError(f"it has not each setting by its name, as in {{name: value}}, but is {settings!r:.90}")
        return [Section("", {str(name): value for name, value in settings.items()})]


def form_of(text: str) -> str:
    text = COMMENT.sub("", text)  # in which there may be a command that uses the file
    if text.startswith("{"):
        return "JSON"
    if CALL.search(text):
        return "Python"
    if OPTION.search(text):
        return "a command"
    return "TOML" if ASSIGNMENT.search(text) else "YAML"


def each_once(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dictionary of pairs. Raises ValueError: a name is there twice, of which most parsers keep the last."""
    settings: dict[Any, Any] = {}
    for name, value in pairs:
        if name in settings:
            raise ValueError(f"{name} is there twice: keep one of the two")
        settings[name] = value
    return settings


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML without aliases, a few of which can fill the memory, and with each name once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name): write out what they stand for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        each_once((self.construct_object(key, deep=True), None) for key, _ in node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": lambda text: json.loads(text, object_pairs_hook=each_once),
    "TOML": tomllib.loads,
    "YAML": lambda text: yaml.load(text, Loader),
}


def command(text: str) -> Section:
    """The options of a command line, those of what starts it (accelerate, torchrun) included."""
    lines = re.sub(r"\\(\r?\n|$)", " ", COMMENT.sub("", text)).splitlines()
    commands = list(filter(OPTION.search, lines))
    if len(commands) > 1 and not all(line.lstrip().startswith("--") for line in commands):
        raise ValueError(f"it has {len(commands)} commands: paste one")
    tokens = shlex.split(" ".join(commands))
    before_options: list[str] = []
    pairs: list[tuple[str, list[str]]] = []
    for token in tokens:
        if TO_ANOTHER.match(token):
            break
        if re.match("--[A-Za-z]", token):
            name, equals, value = token.removeprefix("--").partition("=")
            pairs.append((name.replace("-", "_"), [value] if equals else []))
        elif pairs and not token.endswith(".py"):
            pairs[-1][1].append(token)
        else:
            before_options.append(token.rpartition("/")[2])
    settings = each_once((name, option_value(values)) for name, values in pairs)
    return Section("", settings, tuple(before_options))


def option_value(values: list[str]) -> Any:
    """As YAML reads it: a number, a truth, a text or a dictionary; of an option alone, true; of several, a list."""
    if not values:
        return True
    parts = []
    for value in values:
        parts.append(Unwritten(value) if FILLED_IN.search(value) else yaml.load(value, Loader))
    return parts if len(parts) > 1 else parts[0]


def calls(text: str) -> list[Section]:
    """The calls in a script, each with what is written out of its arguments. Raises ValueError: a class twice."""
    text = re.sub(r"(?m)^[^\S\n]*[!%].*", "", text)  # a notebook's own commands
    tree = ast.parse(dedent(text))
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    constants = {name: values[0] for name, values in assigned.items() if len(values) == 1}
    sections = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and CALL.search(f"{ast.unparse(node.func)}("):
            sections.append(Section(ast.unparse(node.func), called_with(node, constants)))
    return sections


def called_with(node: ast.Call, constants: dict[str, ast.expr]) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = []
    for position, argument in enumerate(node.args):
        pairs.append((str(position), written(argument, constants)))
    for keyword in node.keywords:
        value = written(keyword.value, constants)
        if keyword.arg:
            pairs.append((keyword.arg, value))
        elif isinstance(value, dict):
            pairs += value.items()
        else:
            pairs.append(("**", value))
    return each_once((name, value) for name, value in pairs if value is not NotImplemented)


def written(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """The value that an expression has without being run; NotImplemented for an object that a call has made."""
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
        if isinstance(node, ast.Call):
            return NotImplemented
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in BY_NAME:
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Unwritten(ast.unparse(node))
