"""Write docs/commands.md, the page of the command line, from the parser: `python tools/commands_page.py`.

Run it after a change of `workbench/base/commands.toml`, of a recipe's fields or of a command's docstring: a test
compares.
"""

import argparse
import inspect
import re
from pathlib import Path

from workbench import __main__ as command_line
from workbench.base.command_line import COMMANDS
from workbench.gpus.catalogue import GPUS
from workbench.techniques import REGISTRY

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
TITLE = (
    "# Commands\n\n<!-- Written by tools/commands_page.py from the parser: a change belongs there. -->\n\n"
    "After `make` the command is `.venv/bin/workbench`; `python -m workbench` is the same. `workbench COMMAND --help` "
    "says in a terminal what this page says. Every setting is checked before anything is loaded, and a name that is "
    "nearly right is guessed."
)
RECIPE = (
    "## A recipe\n\n`run`, `predict`, `plan` and `script` take one: a model or [a recipe file](data.md#a-recipe-file), "
    "and over it these settings."
)
NAMES_OF_CARDS = ", ".join(GPUS)
NAMES_OF_TECHNIQUES = ", ".join(REGISTRY)


def page() -> str:
    """The whole page, in Markdown."""
    commands = choices(command_line._parser())
    of_a_recipe = [list(map(row, visible_actions(commands[name]))) for name in COMMANDS if "recipe" in COMMANDS[name]]
    shared = [line for line in of_a_recipe[0] if all(line in lines for lines in of_a_recipe)]
    shared = [line for line in shared if not line.startswith("| `--json`")]
    parts = [TITLE, overview(), RECIPE, table(shared)]
    for name, command in commands.items():
        parts += section(name, command, shared)
    parts += ["## Cards", f"{len(GPUS)} are known by name: {code(NAMES_OF_CARDS)}."]
    parts += [
        "## Techniques",
        f"What each shrinks, costs and takes says `workbench list`: {code(NAMES_OF_TECHNIQUES)}.",
    ]
    parts += ["## Exit codes", exit_codes()]
    return "\n\n".join(parts) + "\n"


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Each command with its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def visible_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def overview() -> str:
    lines = [f"| [`{name}`](#{name}) | {cell(command['help'])} |" for name, command in COMMANDS.items()]
    lines.append("| `--version` | versions, the device and where records lie, as an issue should tell them |")
    return "\n".join(["| command | |", "|---|---|", *lines])


def section(name: str, command: argparse.ArgumentParser, shared: list[str]) -> list[str]:
    parts = [
        f"## {name}",
        prose(str(inspect.getdoc(command_line.COMMAND_FUNCTIONS[name]) or sentence(COMMANDS[name]["help"]))),
    ]
    parts.append(f"```bash\nworkbench {COMMANDS[name]['example']}\n```")
    rows = [row(action) for action in visible_actions(command)]
    if "recipe" in COMMANDS[name]:
        rows = [line for line in rows if line not in shared]
        parts.append("Beside [a recipe](#a-recipe):")
    return [*parts, table(rows)]


def prose(text: str) -> str:
    """A docstring in one line, and options in it as code, where they are not yet."""
    return re.sub(r"(`[^`]*`)|(--[a-z][a-z-]*)", as_code, " ".join(text.split()))


def as_code(match: re.Match[str]) -> str:
    return match[1] or f"`{match[2]}`"


def sentence(text: str) -> str:
    ending = "" if text.endswith("?") else "."
    return f"{text[0].upper()}{text[1:]}{ending}"


def table(rows: list[str]) -> str:
    return "\n".join(["| | |", "|---|---|", *rows])


def row(action: argparse.Action) -> str:
    return f"| {written(action)} | {meaning(action)} |"


def written(action: argparse.Action) -> str:
    """As it is typed: its names, and what follows them."""
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
    """In a table, where a bar would end the cell."""
    return text.replace("|", "\\|")


def code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def exit_codes() -> str:
    lines = str(command_line.__doc__).partition("exit codes:\n")[2].splitlines()
    rows: list[str] = []
    for line in lines:
        number, _, text = line.strip().partition("  ")
        if number.isdigit():
            rows.append(f"| {number} | {text.strip()} |")
        elif line.strip():  # it goes on
            rows[-1] = rows[-1].removesuffix(" |") + f" {line.strip()} |"
    return table(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name} is written")
