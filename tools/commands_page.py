"""Write docs/commands.md, the page of the command line, from the parser: `python tools/commands_page.py`.

Run it after a change of `workbench/base/commands.toml`, of a recipe's fields or of a command's docstring: a test
compares.
"""

import argparse
import inspect
import re

from workbench import __main__ as command_line
from workbench.base.command_line import COMMANDS, PROGRAM
from workbench.base.paths import ROOT, write_whole
from workbench.gpus.catalogue import GPUS
from workbench.techniques import REGISTRY

PAGE = ROOT / "docs" / "commands.md"
TITLE = (
    "# Commands\n\n<!-- Written by tools/commands_page.py from the parser: a change belongs there. -->\n\n"
    "After `make` the command is `.venv/bin/workbench`; `python -m workbench` is the same. `workbench COMMAND --help` "
    "says in a terminal what this page says. Every setting is checked before anything is loaded, and a name that is "
    "nearly right is guessed."
)
RECIPE = (
    "## A recipe\n\n`run`, `predict`, `plan` and `script` take one: a model, [a recipe file](recipes.md#a-recipe-file) "
    "or [other settings](recipes.md#settings), and over it these settings."
)
NAMES_OF_CARDS = ", ".join(GPUS)
NAMES_OF_TECHNIQUES = ", ".join(REGISTRY)


def page() -> str:
    """Return the whole page, in Markdown."""
    parsers = parsers_of_commands()
    shared = rows_of_a_recipe(parsers)
    parts = [TITLE, overview(), RECIPE, table(shared)]
    for name, parser in parsers.items():
        parts += section(name, rows(parser), shared)
    parts.append("## Cards")
    parts.append(f"{len(GPUS)} are known by name: {code(NAMES_OF_CARDS)}.")
    parts.append("## Techniques")
    parts.append(f"What each shrinks, costs and takes says `workbench list`: {code(NAMES_OF_TECHNIQUES)}.")
    parts.append("## Exit codes")
    parts.append(exit_codes())
    return "\n\n".join(parts) + "\n"


def parsers_of_commands() -> dict[str, argparse.ArgumentParser]:
    for action in command_line._parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def rows_of_a_recipe(parsers: dict[str, argparse.ArgumentParser]) -> list[str]:
    """Return the rows that all commands with a recipe share, but for `--json`, which is nothing of a recipe's."""
    takers = [rows(parsers[name]) for name in COMMANDS if "recipe" in COMMANDS[name]]
    shared = []
    for line in takers[0]:
        if all(line in lines for lines in takers) and not line.startswith("| `--json`"):
            shared.append(line)
    return shared


def overview() -> str:
    lines = ["| command | |", "|---|---|"]
    for name, command in COMMANDS.items():
        lines.append(f"| [`{name}`](#{name}) | {cell(command['help'])} |")
    lines.append("| `--version` | versions, the device and where records lie, as an issue should tell them |")
    return "\n".join(lines)


def section(name: str, lines: list[str], shared: list[str]) -> list[str]:
    """Return a command's section: what it does, an example, and what it takes beside a recipe."""
    command = COMMANDS[name]
    docstring = inspect.getdoc(command_line.COMMAND_FUNCTIONS[name])
    parts = [f"## {name}"]
    parts.append(prose(docstring or sentence(command["help"])))
    parts.append(f"```bash\nworkbench {command['example']}\n```")
    if "recipe" in command:
        lines = [line for line in lines if line not in shared]
        parts.append("Beside [a recipe](#a-recipe):")
    parts.append(table(lines))
    return parts


def prose(text: str) -> str:
    """Return a docstring in one line, with its options as code."""
    return re.sub(r"(`[^`]*`)|(--[a-z][a-z-]*)", as_code, " ".join(text.split()))


def as_code(match: re.Match[str]) -> str:
    return match[1] or f"`{match[2]}`"


def sentence(text: str) -> str:
    ending = "" if text.endswith("?") else "."
    return f"{text[0].upper()}{text[1:]}{ending}"


def table(lines: list[str]) -> str:
    return "\n".join(["| | |", "|---|---|", *lines])


def rows(parser: argparse.ArgumentParser) -> list[str]:
    """Return a line for each argument and option, but for `--help`."""
    lines = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            lines.append(f"| {usage(action)} | {meaning(action)} |")
    return lines


def usage(action: argparse.Action) -> str:
    """Return an argument or option as it is typed: its names, and the value that follows them."""
    value = action.metavar or action.dest.upper()
    if action.choices:
        value = "|".join(map(str, action.choices))
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{cell(value)}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} `{cell(value)}`"


def meaning(action: argparse.Action) -> str:
    text = str(action.help)
    text = text.replace(f"one of {NAMES_OF_CARDS}", "[a card](#cards)")
    text = text.replace(f"Known: {NAMES_OF_TECHNIQUES} (see `list`)", "[All of them](#techniques)")
    return cell(prose(text))


def cell(text: str) -> str:
    """Escape the bars in a text, each of which would end a table's cell."""
    return text.replace("|", "\\|")


def code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def exit_codes() -> str:
    listed = PROGRAM["exit_codes"].partition("exit codes:\n")[2]
    lines: list[str] = []
    for line in listed.splitlines():
        number, _, text = line.strip().partition("  ")
        if number.isdigit():
            lines.append(f"| {number} | {text.strip()} |")
        elif line.strip():  # the line before goes on
            lines[-1] = lines[-1].removesuffix(" |") + f" {line.strip()} |"
    return table(lines)


if __name__ == "__main__":
    write_whole(PAGE, page())
    print(f"{PAGE.name} is written")
