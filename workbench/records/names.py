"""Names that become part of a path."""

import re
from pathlib import Path

from workbench.errors import ConfigurationError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def valid(name: object) -> bool:
    """1 to 64 letters, digits, dots, dashes and underscores; not `.` or `..`, which are folders."""
    return isinstance(name, str) and bool(NAME.fullmatch(name)) and bool(name.strip("."))


def inside(root: Path, name: str) -> Path:
    """`root / name`.

    Raises:
        ConfigurationError: the name has other characters than letters, digits, `.`, `-` and `_`, or more than 64 of
            them, or the path, links resolved, leaves the root.
    """
    if not valid(name):
        raise ConfigurationError(f"name: {name!r:.90} cannot be a file's. Use 1 to 64 letters, digits, dots, - and _.")
    path = root / name
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigurationError(f"name: {name!r} is a link that leads out of {root}. Remove it.")
    return path
