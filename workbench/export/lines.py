"""Lines of Python, as a script has them: calls, what these need, and how they are broken."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any

from workbench.export.sources import Sources
from workbench.techniques.base import Call

WIDTH = 88  # of a line, ruff's own
INDENT = 4  # of the lines of `main`


class Lines:
    """Lines of `main`, one after another.

    Attributes:
        sources: definitions and imports that they need.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sources = Sources()

    def add(self, *lines: str) -> None:
        self.lines += lines

    def add_call(
        self,
        target: str,
        function: str,
        arguments: list[str],
        settings: Mapping[str, Any],
    ) -> None:
        """A call, as in `args = TrainingArguments(…)`, after the calls that make its settings; a call that is the only
        setting stands in it.

        Args:
            target: what it is assigned to, as in `"args = "`; empty for nothing.
        """
        opening = f"{target}{function}("
        closing = ")"
        if len(settings) == 1:
            [(name, call)] = settings.items()
            if isinstance(call, Call):
                opening += ", ".join([*arguments, f"{name}={self.sources.add(call.function)}("])
                closing = "))"
                arguments = []
                settings = call.settings
        written = [self.setting(name, value) for name, value in settings.items()]
        self.add(broken(opening, [*arguments, *written], closing))

    def add_calls(self, target: str, arguments: list[str], calls: Iterable[Call | None]) -> None:
        """The calls that there are of a technique's or of several, with the functions that they need."""
        for call in calls:
            if call is not None:
                self.add_call(target, self.sources.add(call.function), arguments, call.settings)

    def setting(self, name: str, value: Any) -> str:
        """`name=value`. A value that is made by a call gets lines of its own before, and is given by its name."""
        if isinstance(value, Call):
            self.add_calls(f"{name} = ", [], [value])
            return f"{name}={name}"
        return f"{name}={self.sources.add(value) if callable(value) else literal(value)}"


def broken(opening: str, items: list[str], closing: str) -> str:
    """One line; or if it would be long, as few as hold the items, which ruff is told to leave so."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= WIDTH - INDENT:
        return line
    # An item stays in one piece: its spaces are no places to break at.
    text = " ".join(f"{item},".replace(" ", "\0") for item in items)
    wrapped = wrap(text, WIDTH - 2 * INDENT, break_long_words=False, break_on_hyphens=False)
    inside = [f"    {line}".replace("\0", " ") for line in wrapped]
    return "\n".join([opening, *inside, f"{closing}  # fmt: skip"])


def literal(value: Any) -> str:
    """Python source of a value; texts in double quotes, if there is none in them."""
    written = repr(value)
    return written if '"' in written else written.replace("'", '"')


def near(path: str) -> str:
    """Relative to the working directory, where the script will be run, if it lies below it."""
    pure = PurePath(path)
    here = Path.cwd()
    return pure.relative_to(here).as_posix() if pure.is_relative_to(here) else path
