"""Copies of the notebooks, in a folder where a reader can open and change them."""

import shutil
from filecmp import cmp
from pathlib import Path

from workbench.base.errors import ConfigurationError
from workbench.base.paths import NOTEBOOKS


def copy_lessons(folder: Path, *, force: bool = False) -> int:
    """Copy every notebook into `folder`, and return their number.

    Raises:
        ConfigurationError: a notebook there differs, and `force` does not allow to overwrite it. Nothing is copied.
    """
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    differing = []
    for notebook in notebooks:
        copy = folder / notebook.name
        if copy.exists() and not cmp(notebook, copy, shallow=False):
            differing.append(copy.name)
    if differing and not force:
        raise ConfigurationError(
            f"lessons: {folder} has other contents in {', '.join(differing)}, "
            "perhaps your own work; nothing was copied. Name another folder, "
            "or overwrite them with --force."
        )
    for notebook in notebooks:
        shutil.copyfile(notebook, folder / notebook.name)
    return len(notebooks)
