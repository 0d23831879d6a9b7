"""The pictures of the lessons: the idea of a technique, drawn to the scale of the reader's own recipe.

Each is a file with a function of its name, which returns a `Drawing`. `workbench.lesson` offers all of them.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def picture_called(name: str) -> Any:
    """The function that draws the picture of this name."""
    return getattr(import_module(f"{__name__}.{name}"), name)
