"""The reading of pasted settings: JSON, YAML or TOML, or calls of settings' classes in Python, which is never run."""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from textwrap import dedent
from typing import Any, NamedTuple

import yaml

from workbench.base.errors import ConfigurationError, brief, explain_errors
from workbench.export.elsewhere import command_for, rejection_of_script

LIMIT = 100_000  # the most characters of a text: files of settings are far shorter
ACCEPTED = (
    "Accepted are a recipe or a record of the workbench; JSON, YAML or TOML of TrainingArguments, of TRL's SFTConfig, "
    "of an adapter of PEFT or of BitsAndBytesConfig; and calls of these classes with plain values."
)
ASSIGNMENT = re.compile(r"(?m)^(\[[\w.\"-]+\]|[\w.\"-]+\s*=)")  # a line of TOML
STATEMENT = re.compile(
    r"(?m)^([!%@]|import |from \w|def |class |for |while |with |if .*:|return\b|print\()"
    r"|\b\w*(Config|Arguments|Trainer|Model\w*|from_pretrained)\s*\("
)
OPTION = re.compile(r"(?:^|\s)--[A-Za-z]")
PACKAGES_OF_CLASSES = ("transformers", "trl", "peft")
# Attributes of these are constants that have a text as their value: torch.bfloat16 is "bfloat16".
CONSTANTS = ("torch", "TaskType", "peft.TaskType")


class ClassCall(NamedTuple):
    """A call of a class of settings, with the values of its arguments.

    Attributes:
        name: the class, without the module before it.
    """

    name: str
    positional: tuple[Any, ...]
    keywords: dict[str, Any]


def read_pasted(text: str, form: str = "") -> dict[str, Any] | list[ClassCall]:
    """Return the settings of a file by their names, or the calls in Python text.

    Args:
        form: JSON, TOML or YAML; empty to find it in the text.

    Raises:
        ConfigurationError: the text has none of these forms; a setting is there twice; Python text has anything but
            calls with plain values.
    """
    if len(text) > LIMIT:
        raise ConfigurationError(f"recipe: settings may have {LIMIT:,} characters, got {len(text):,}. {ACCEPTED}")
    text = text.strip("\ufeff \r\n")
    form = form or form_of(text)
    if form == "Python":
        return read_calls(text)
    if form == "a command":
        command = command_for(text)
        raise ConfigurationError(
            f"recipe: a command line is not read, because its program decides what the options mean. {command}"
        )
    with explain_errors(f"recipe: this cannot be read as {form}", ACCEPTED):
        settings = PARSERS[form](text)
        if not isinstance(settings, dict):
            raise ValueError(f"settings need names, as in name: value, got {brief(settings)}")
    return {str(name): value for name, value in settings.items()}


def form_of(text: str) -> str:
    """Return the form of a text: JSON, Python, a command, TOML or YAML."""
    if text.startswith(("{", "[{")):
        return "JSON"
    if re.match(r"#!.*sh\b", text):
        return "a command"
    text = re.sub(r"(?m)(?:^|\s)#.*", "", text)  # A comment of a file may show the command that uses it.
    has_options = OPTION.search(text)
    if STATEMENT.search(text) and not (has_options and not is_python(text)):
        return "Python"
    if has_options:
        return "a command"
    if not ASSIGNMENT.search(text):
        return "YAML"
    with suppress(tomllib.TOMLDecodeError, RecursionError):
        tomllib.loads(text)
        return "TOML"
    return "Python" if is_python(text) else "TOML"


def is_python(text: str) -> bool:
    """Whether a text can be parsed as Python."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        ast.parse(dedent(text))
        return True
    return False


def collect_pairs(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a dictionary of pairs. Raises ValueError if a name is there twice; most parsers keep the last of two
    without a word."""
    settings: dict[Any, Any] = {}
    for name, value in pairs:
        if name in settings:
            raise ValueError(f"{name} is there twice: keep one of the two")
        settings[name] = value
    return settings


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that rejects aliases, a few of which can fill the memory, and names that are there twice."""

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


def read_calls(text: str) -> list[ClassCall]:
    """Read Python text that has nothing but calls, each of which may be assigned to a name.

    Raises ConfigurationError: it has anything else, which is named with its line.
    """
    try:
        tree = ast.parse(dedent(text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise rejection_of_script(text, line, "it is not complete Python") from None
    calls = []
    for statement in tree.body:
        targets: list[ast.expr] = []
        node = None
        if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign):
            node = statement.value
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if not isinstance(node, ast.Call):
            raise rejection_of_script(text, statement.lineno, "it is more than calls of settings' classes")
        if len(targets) > 1 or not all(isinstance(target, ast.Name) for target in targets):
            raise rejection_of_script(text, statement.lineno, "paste the call alone, or assigned to one name")
        calls.append(read_call(node, text))
    return calls


def read_call(node: ast.Call, text: str) -> ClassCall:
    """Read one call. Raises ConfigurationError: an argument is not a plain value."""
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        line = keyword.value.lineno
        if keyword.arg is None:
            raise rejection_of_script(text, line, f"**{ast.unparse(keyword.value)} is not a plain value")
        if keyword.arg in keywords:
            raise rejection_of_script(text, line, f"{keyword.arg} is there twice")
        keywords[keyword.arg] = read_value(keyword.value, text)
    module, _, name = ast.unparse(node.func).rpartition(".")
    if module.partition(".")[0] not in ("", *PACKAGES_OF_CLASSES):
        raise rejection_of_script(text, node.lineno, f"{module}.{name} is not a class of settings that is read")
    positional = tuple(read_value(argument, text) for argument in node.args)
    return ClassCall(name, positional, keywords)


def read_value(node: ast.expr, text: str) -> Any:
    """Return the value of a literal, or the name of a constant such as torch.bfloat16.

    Raises ConfigurationError: it is another expression, whose value only a run would know.
    """
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in CONSTANTS:
        return node.attr
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        reason = f"{ast.unparse(node):.60} is not a plain value"
        raise rejection_of_script(text, node.lineno, reason) from None
