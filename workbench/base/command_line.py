"""The command line: a parser built from `commands.toml`, whose errors name the nearest known command or option."""

import argparse
import errno
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from workbench.base.categories import drop_thousands_commas
from workbench.base.errors import ConfigurationError, WorkbenchError, missing_extra_error, visible
from workbench.base.paths import FULL, read_beside, versions
from workbench.base.settings import unknown_name_error
from workbench.base.unforeseen import describe, write_report

MODULE = "python -m workbench"
# Exit codes, beside those of `WorkbenchError`.
OUT_OF_MEMORY = 4
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130
COMMANDS = read_beside(__file__, "commands.toml")
PROGRAM = COMMANDS.pop("program")
RECIPE = COMMANDS.pop("recipe")  # options of all commands that take a recipe, beside the recipe's own settings
# Each command of version 0.3 that is gone has a sentence here that says what does the same today.
RETIRED = {
    "frontier": "The panel has it, under What fits where.",
    "env": "Use --version.",
    "try": "Call workbench.side_by_side(recipe, recipe | technique) from Python.",
    "headline": "In a checkout, run tools/headline.py.",
    "pairs": "In a checkout, run tools/pairs.py.",
    "sweep": "Loop over recipes in Python: docs/recipes.md has the lines.",
    "verify": "In a checkout, run tools/verify.py.",
}


def build_parser(
    functions: Mapping[str, Callable[[argparse.Namespace], int | None]],
    recipe_options: Mapping[str, tuple[str, str]],
    names: Mapping[str, str],
    show_versions: Callable[[], None],
) -> "Parser":
    """Build the parser of the whole command line.

    Args:
        functions: a function for each command; its docstring is the command's description.
        recipe_options: for each field of a recipe, the option and its help.
        names: the texts that replace `{gpus}` and `{techniques}` in `commands.toml`.
        show_versions: the function that `--version` calls.
    """
    program = "workbench" if Path(sys.argv[0]).stem == "workbench" else MODULE
    parser = Parser(
        prog=program,
        description=PROGRAM["title"],
        epilog=f"{PROGRAM['examples'].replace(MODULE, program)}\n\n{PROGRAM['exit_codes']}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    help_text = "show versions, GPUs and where records are stored, as an issue should tell them, and exit"
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
    """Add an option to a parser; its fields are those of `add_argument`, the type by its name in `TYPES`."""
    if "type" in fields:
        fields["type"] = TYPES[fields["type"]]
    if isinstance(fields.get("metavar"), list):
        fields["metavar"] = tuple(fields["metavar"])
    parser.add_argument(*option.split(), **fields)


def split_off_program(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the command line, and the program that stands behind `--` of `plan`: options that follow
    it are the program's."""
    if arguments[:1] != ["plan"] or "--" not in arguments:
        return arguments, []
    index = arguments.index("--")
    return arguments[:index], arguments[index + 1 :]


def _add_recipe(parser: argparse.ArgumentParser, recipe_options: Mapping[str, tuple[str, str]]) -> None:
    for name, (option, help_text) in recipe_options.items():
        if name == "model":
            help_text += "; or a file of settings: RECIPE.toml, sft.yaml"
            parser.add_argument("model", nargs="?", default="auto", help=help_text)
        else:
            # The field's own name is an option as well: --micro-batch-size beside --batch-size.
            both = dict.fromkeys((option, f"--{name.replace('_', '-')}"))
            parser.add_argument(*both, dest=name, metavar="X", help=help_text)


def _at_least(least: int, number: type = int) -> Callable[[str], Any]:
    """Return a function that reads a number from a text, and refuses one below the least."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            value = number(drop_thousands_commas(text))
            if value >= least:
                return value
        raise argparse.ArgumentTypeError(f"{text!r:.90} is not a number of at least {least}.")

    return read


def _share(text: str) -> float:
    """Read a share: `all` is 1, `none` is 0, and a number lies between them."""
    with suppress(ValueError):
        share = float({"all": "1", "none": "0"}.get(text, text))
        if 0 <= share <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r:.90} is not all, none or a share between 0 and 1.")


# commands.toml names the type of an option; each type has the function that reads the option's text.
TYPES: dict[str, Callable[[str], Any]] = {
    "count": _at_least(1),
    "number": _at_least(0),
    "seconds": _at_least(0, float),
    "path": Path,
    "share": _share,
}


def exit_code_of(act: Callable[[], int], typed: Sequence[str]) -> int:
    """Return the exit code that `act` returns. An error that it raises becomes one sentence on standard error, and its
    code.

    Args:
        typed: the words of the command line, for the report about an error that nobody foresaw.
    """
    try:
        return act()
    except WorkbenchError as error:
        message = str(error)
        exit_code = error.exit_code
    except ModuleNotFoundError as error:
        unavailable = missing_extra_error(error)
        if unavailable is None:
            return _report(error, typed)
        message = str(unavailable)
        exit_code = unavailable.exit_code
    except OSError as error:
        if error.filename is None and error.errno not in (*FULL, errno.EIO, errno.EBADF):
            return _report(error, typed)
        cure = "Make room, or name another place." if error.errno in FULL else "Name another place."
        message = f"{error.filename or 'the output'}: {error.strerror}. {cure}"
        exit_code = 1
    except MemoryError:
        message = "this computer's memory is full. End other programs, or ask for a smaller model, batch or dataset."
        exit_code = OUT_OF_MEMORY
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return _report(error, typed)
    print(visible(f"error: {message}"), file=sys.stderr)
    return exit_code


def _report(error: Exception, typed: Sequence[str]) -> int:
    """Say in one sentence what failed, and where its traceback is; return the exit code."""
    try:
        place = f"The traceback is in {write_report(error, typed, versions())}."
    except OSError:  # there is no room for the file either
        traceback.print_exception(error)
        place = "The traceback is above."
    failure = describe(error)
    print(visible(f"error: {' '.join(typed[:1])}: {failure.sentence}. {place} {failure.cure}"), file=sys.stderr)
    return BUG if failure.is_bug else 1


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest known command or option."""

    def print_help(self, file: Any = None) -> None:
        print_visibly(self.format_help().rstrip(), sys.stdout)

    def error(self, message: str) -> NoReturn:
        match = re.search(r"(.*): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if match and match[2] in RETIRED:
            raise ConfigurationError(f"{match[2]} is no command since version 0.4. {RETIRED[match[2]]}")
        if match:
            raise unknown_name_error(f"{self.prog}: {match[1]} takes no", match[2], re.findall(r"[\w-]+", match[3]))
        super().error(visible(message))

    def refuse(self, argument: str) -> NoReturn:
        """Raise a ConfigurationError over an argument that this command does not know."""
        name = argument.partition("=")[0]
        options = [option for option in self._option_string_actions if option.startswith("--")]
        message = str(unknown_name_error(f"{self.prog} takes no", name, options))
        if "--set" in options and name.startswith("--") and "Did you mean" not in message:
            message += f" A field of TrainingArguments is --set arguments.{name.strip('-').replace('-', '_')}=VALUE."
        raise ConfigurationError(message)


class _AtOnce(argparse.Action):
    """An option in the place of a command: it calls its `const` and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        self.const()
        parser.exit()


def print_visibly(text: str, stream: TextIO | None) -> None:
    """Print a text so that nothing in it colours, moves or reverses what a terminal shows."""
    if stream is None:  # Python sets sys.stdout to None if it was closed before the start
        return
    try:
        print(visible(text), file=stream, flush=True)
    except OSError as error:
        # Python flushes the rest of the text when it ends, and would complain again: the rest goes to the null device.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):  # a broken pipe is no fault: nobody reads on, as after `| head -1`
            raise
