"""The reading of pasted settings: JSON, YAML, TOML, a command line, or calls in a Python script, which is never run."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from workbench.base.errors import explain_errors

INSTEAD = "Run its own script on a card in software: workbench emulate --gpu CARD -- python SCRIPT"
CURE = (
    "Paste a recipe of the workbench, TrainingArguments, a command line, calls of a script, "
    "or a file of TRL, PEFT, accelerate, DeepSpeed, LLaMA-Factory or axolotl."
)
LIMIT = 100_000  # the most characters of a text: files of settings are far shorter
ASSIGNMENT = re.compile(r"(?m)^[\w.\"-]+\s*=")  # a line of TOML
CALL = re.compile(r"\b(\w*(Config|Arguments|Trainer)|from_pretrained|FastLanguageModel\.\w+)\s*\(")
OPTION = re.compile(r"(?:^|\s)--[A-Za-z]")
FILLED_IN = re.compile(r"\$[\w{(]")  # a value that a shell fills in
COMMENT = re.compile(r"(?m)(?:^|\s)#.*|`#[^`]*`")  # `#…` in backquotes is one inside a command of several lines
TO_ANOTHER = re.compile(r"[0-9&]*[<>]|[|;&]+$")  # a redirection, or the beginning of another command
BY_NAME = ("torch", "TaskType")  # Attributes of these are their own names as settings: torch.bfloat16 is bfloat16.


class Unwritten(str):
    """The source of a value that only a run would know."""


class Section(NamedTuple):
    """The settings of one call of a script, or of a whole file.

    Attributes:
        owner: the name of the class or function that is called; "" for a file or a command.
        before_options: the words of a command before its options; None for a file or a script.
    """

    owner: str
    settings: dict[str, Any]
    before_options: tuple[str, ...] | None = None


def read_sections(text: str) -> list[Section]:
    """Read the settings in a text. Raises ConfigurationError: it has none of these forms, or names a setting twice."""
    text = text.strip("\ufeff \r\n")
    form = form_of(text[:LIMIT])
    with explain_errors(f"recipe: this cannot be read as {form}", CURE):
        if len(text) > LIMIT:
            raise ValueError(f"it has more than {LIMIT:,} characters")
        if form == "Python":
            return read_calls(text)
        if form == "a command":
            return [read_command(text)]
        settings = PARSERS[form](text)
        if not isinstance(settings, dict):
            raise ValueError(f"it has not each setting by its name, as in {{name: value}}, but is {settings!r:.90}")
        return [Section("", {str(name): value for name, value in settings.items()})]


def form_of(text: str) -> str:
    """Tell the form of a text: JSON, Python, a command, TOML or YAML."""
    text = COMMENT.sub("", text)  # A comment of a file may show the command that uses it.
    if text.startswith("{"):
        return "JSON"
    if CALL.search(text):
        return "Python"
    if OPTION.search(text):
        return "a command"
    return "TOML" if ASSIGNMENT.search(text) else "YAML"


def collect_pairs(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Make a dictionary of pairs. Raises ValueError: a name is there twice; most parsers keep the last in silence."""
    settings: dict[Any, Any] = {}
    for name, value in pairs:
        if name in settings:
            raise ValueError(f"{name} is there twice: keep one of the two")
        settings[name] = value
    return settings


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of YAML that refuses aliases, a few of which can fill the memory, and names that are there twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has aliases (*name): write out what they stand for")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        collect_pairs((self.construct_object(key, deep=True), None) for key, _ in node.value)
        return super().construct_mapping(node, deep=deep)


PARSERS: dict[str, Callable[[str], Any]] = {
    "JSON": lambda text: json.loads(text, object_pairs_hook=collect_pairs),
    "TOML": tomllib.loads,
    "YAML": lambda text: yaml.load(text, Loader),
}


def read_command(text: str) -> Section:
    """Read the options of a command line, those of a launcher (accelerate, torchrun) included."""
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
    settings = collect_pairs((name, option_value(values)) for name, values in pairs)
    return Section("", settings, tuple(before_options))


def option_value(values: list[str]) -> Any:
    """Read an option's value as YAML: a number, a boolean, a text or a dictionary; several values are a list, and an
    option without a value is true."""
    if not values:
        return True
    parts = []
    for value in values:
        parts.append(Unwritten(value) if FILLED_IN.search(value) else yaml.load(value, Loader))
    return parts if len(parts) > 1 else parts[0]


def read_calls(text: str) -> list[Section]:
    """Read the calls of settings' classes in a script, with their arguments. Raises ValueError: a name is there twice
    in one call."""
    text = re.sub(r"(?m)^[^\S\n]*[!%].*", "", text)  # A notebook's own commands are no Python.
    tree = ast.parse(dedent(text))
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, []).append(node.value)
    constants = {name: values[0] for name, values in assigned.items() if len(values) == 1}
    sections = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and CALL.search(f"{ast.unparse(node.func)}("):
            sections.append(Section(ast.unparse(node.func), call_arguments(node, constants)))
    return sections


def call_arguments(node: ast.Call, constants: dict[str, ast.expr]) -> dict[str, Any]:
    """Return the arguments of a call by name, or by position as "0", "1". A variable that holds what another
    call made is left out.

    Args:
        constants: the expressions of the script's variables that are assigned once.
    """
    pairs: list[tuple[str, Any]] = []
    for position, argument in enumerate(node.args):
        pairs.append((str(position), read_value(argument, constants)))
    for keyword in node.keywords:
        value = read_value(keyword.value, constants)
        if keyword.arg:
            pairs.append((keyword.arg, value))
        elif isinstance(value, dict):
            pairs += value.items()
        else:
            pairs.append(("**", value))
    return collect_pairs((name, value) for name, value in pairs if value is not NotImplemented)


def read_value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    """Return the value of an expression without running it.

    Returns Unwritten for one that only a run would know, and NotImplemented for an object that a call has made.
    """
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
