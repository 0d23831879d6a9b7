"""The notebooks, copied to where a reader can open and change them."""

import shutil
from filecmp import cmp
from pathlib import Path

from workbench.base.errors import ConfigurationError
from workbench.base.paths import NOTEBOOKS


def copy_lessons(folder: Path, *, force: bool = False) -> list[Path]:
    """Copy every notebook into `folder`, which is made if it is not there.

    Raises:
        ConfigurationError: `folder` is a file, or a notebook in it differs and `force` does not allow to overwrite
            it. Nothing is copied then.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(f"lessons: {folder} is a file. Name a folder, which is made if it is not there.")
    copies = {notebook: folder / notebook.name for notebook in sorted(NOTEBOOKS.glob("*.ipynb"))}
    differing = [copy.name for notebook, copy in copies.items() if copy.exists() and not cmp(notebook, copy, False)]
    if differing and not force:
        raise ConfigurationError(
            f"lessons: {folder} has other contents in {', '.join(differing)}, perhaps your own work; nothing was "
            "copied. Name another folder, or overwrite them with --force."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for notebook, copy in copies.items():
        shutil.copyfile(notebook, copy)
    return list(copies.values())
