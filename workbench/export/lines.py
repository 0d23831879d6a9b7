"""Lines of Python for a script: calls, the functions that these need, and the breaking of long lines."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from textwrap import wrap
from typing import Any

from workbench.export.sources import Sources
from workbench.techniques.base import Call

WIDTH = 88  # the most characters of a line, ruff's default
INDENT = 4  # the spaces before each line of `main`


class Lines:
    """The lines of `main`, without their indentation.

    Attributes:
        sources: the definitions and imports that the lines need.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.sources = Sources()

    def add(self, *lines: str) -> None:
        """Add lines as they are."""
        self.lines += lines

    def add_call(
        self,
        target: str,
        function: str,
        arguments: list[str],
        settings: Mapping[str, Any],
    ) -> None:
        """Add a call, such as `args = TrainingArguments(…)`, after the calls that make its settings. A single setting
        that is a call stands inside of it.

        Args:
            target: the assignment, such as `"args = "`; "" for none.
            arguments: as source.
            settings: keyword arguments by name, as values.
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
        keywords = [self.setting(name, value) for name, value in settings.items()]
        self.add(wrap_call(opening, [*arguments, *keywords], closing))

    def add_calls(self, target: str, arguments: list[str], calls: Iterable[Call | None]) -> None:
        """Add the techniques' calls, leaving out None, and the functions that they need."""
        for call in calls:
            if call is not None:
                self.add_call(target, self.sources.add(call.function), arguments, call.settings)

    def setting(self, name: str, value: Any) -> str:
        """Return `name=value` as source. A value that a call makes gets a line of its own before, and stands here by
        its name."""
        if isinstance(value, Call):
            self.add_calls(f"{name} = ", [], [value])
            return f"{name}={name}"
        return f"{name}={self.sources.add(value) if callable(value) else literal(value)}"


def wrap_call(opening: str, items: list[str], closing: str) -> str:
    """Return a call on one line or, if that would be long, on as few as hold the items, with a comment that has ruff
    leave them so."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= WIDTH - INDENT:
        return line
    # An item stays in one piece, so its spaces are hidden from `wrap`.
    text = " ".join(f"{item},".replace(" ", "\0") for item in items)
    wrapped = wrap(text, WIDTH - 2 * INDENT, break_long_words=False, break_on_hyphens=False)
    inside = [f"    {line}".replace("\0", " ") for line in wrapped]
    return "\n".join([opening, *inside, f"{closing}  # fmt: skip"])


def literal(value: Any) -> str:
    """Return the Python source of a value; texts have double quotes, unless there are any in them."""
    source = repr(value)
    return source if '"' in source else source.replace("'", '"')


def relative_path(path: str) -> str:
    """Return a path relative to the working directory, where the script will be run, if it lies below it."""
    pure = PurePath(path)
    here = Path.cwd()
    return pure.relative_to(here).as_posix() if pure.is_relative_to(here) else path
