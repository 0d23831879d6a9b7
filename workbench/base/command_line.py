"""The command line: a parser made of `commands.toml`, whose errors name the nearest that is known."""

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from workbench.base.categories import ungrouped
from workbench.base.errors import ConfigurationError, visible
from workbench.base.paths import beside
from workbench.base.settings import unknown

MODULE = "python -m workbench"
COMMANDS = beside(__file__, "commands.toml")
RECIPE = COMMANDS.pop("recipe")  # what commands take with a recipe, beside its own settings
# commands of version 0.3, and what does the same
RETIRED = {
    "frontier": "The panel has it, under What fits where.",
    "env": "Use --version.",
    "try": "Call workbench.side_by_side(recipe, recipe | technique) from Python.",
    "headline": "In a checkout, run tools/headline.py.",
    "pairs": "In a checkout, run tools/pairs.py.",
    "sweep": "Loop over recipes in Python: docs/data.md has the lines.",
    "verify": "In a checkout, run tools/verify.py.",
}


def parser_of(
    functions: Mapping[str, Callable[[argparse.Namespace], int | None]],
    text: str,
    recipe_options: Mapping[str, tuple[str, str]],
    names: Mapping[str, str],
    show_versions: Callable[[], None],
) -> "Parser":
    """The parser of the whole command line.

    Args:
        functions: of each command; its docstring is the command's description.
        text: three paragraphs: a title, examples, exit codes.
        recipe_options: of each field of a recipe the option, and its help.
        names: what stands for `{gpus}` and `{techniques}` in `commands.toml`.
        show_versions: what `--version` does.
    """
    program = "workbench" if Path(sys.argv[0]).stem == "workbench" else MODULE
    title, examples, exit_codes = text.replace(MODULE, program).split("\n\n")
    parser = Parser(
        prog=program,
        description=title,
        epilog=f"{examples}\n\n{exit_codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_text = "show versions, the device and where records lie, as an issue should tell them, and exit"
    parser.add_argument("--version", action=_AtOnce, nargs=0, const=show_versions, help=help_text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, row in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=row["help"],
            usage=row.get("usage"),
            description=inspect.getdoc(functions[name]),
            epilog=f"example: {program} {row['example']}",
        )
        command.set_defaults(function=functions[name], parser=command, json=False)
        takes = row["takes"]
        if "recipe" in row:
            _add_recipe(command, recipe_options)
            takes = RECIPE["takes"] | takes
        for option, fields in takes.items():
            add_option(command, option, **{**fields, "help": fields["help"].format_map(names)})
    return parser


def add_option(parser: argparse.ArgumentParser, option: str, **fields: Any) -> None:
    """Add one; its fields are those of `add_argument`, the type by its name in `TYPES`."""
    if "type" in fields:
        fields["type"] = TYPES[fields["type"]]
    if isinstance(fields.get("metavar"), list):
        fields["metavar"] = tuple(fields["metavar"])
    parser.add_argument(*option.split(), **fields)


def without_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of the command line, and the program that `plan` is given behind `--`, whose options are its."""
    if arguments[:1] != ["plan"] or "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _add_recipe(parser: argparse.ArgumentParser, recipe_options: Mapping[str, tuple[str, str]]) -> None:
    for name, (option, help_text) in recipe_options.items():
        if name == "model":
            parser.add_argument("model", nargs="?", default="auto", help=f"{help_text}; or a recipe file, RECIPE.toml")
        else:
            # a field's own name is taken, too
            both = dict.fromkeys((option, f"--{name.replace('_', '-')}"))
            parser.add_argument(*both, dest=name, metavar="X", help=help_text)


def _at_least(least: int, number: type = int) -> Callable[[str], Any]:
    """A reader of texts that are a number of at least this."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            value = number(ungrouped(text))
            if value >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text!r:.90} is not a number of at least {least}.")

    return read


def _share(text: str) -> float:
    """`all`, `none`, or a number between them."""
    with suppress(ValueError):
        share = float({"all": "1", "none": "0"}.get(text, text))
        if 0 <= share <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r:.90} is not all, none or a share between 0 and 1.")


# what an option's `type` in commands.toml reads
TYPES: dict[str, Callable[[str], Any]] = {
    "count": _at_least(1),
    "number": _at_least(0),
    "seconds": _at_least(0, float),
    "path": Path,
    "share": _share,
}


class Parser(argparse.ArgumentParser):
    """Its errors name the nearest that is known."""

    def print_help(self, file: Any = None) -> None:
        print_visibly(self.format_help().rstrip(), sys.stdout)

    def error(self, message: str) -> NoReturn:
        match = re.search(r"(.*): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if match and match[2] in RETIRED:
            raise ConfigurationError(f"{match[2]} is no command since version 0.4. {RETIRED[match[2]]}")
        if match:
            raise unknown(f"{self.prog}: {match[1]} takes no", match[2], re.findall(r"[\w-]+", match[3]))
        super().error(visible(message))

    def refuse(self, argument: str) -> NoReturn:
        """What it does not know. Raises ConfigurationError."""
        name = argument.partition("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        message = str(unknown(f"{self.prog} takes no", name, options))
        if "--set" in options and name.startswith("--") and "Did you mean" not in message:
            message += f" A field of TrainingArguments is --set arguments.{name.strip('-').replace('-', '_')}=VALUE."
        raise ConfigurationError(message)


class _AtOnce(argparse.Action):
    """An option in the place of a command: calls its `const`, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        self.const()
        parser.exit()


def print_visibly(text: str, stream: TextIO | None) -> None:
    """Print a text, in which nothing colours, moves or reverses what a terminal shows."""
    if stream is None:  # it is closed
        return
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        # else Python complains of what is left at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):  # nobody reads on, as after `| head -1`
            raise
