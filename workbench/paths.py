"""Where the workbench keeps things: the embedded models, texts and notebooks, and the learner's own runs.

In a checkout they lie beside the package; a wheel has them in `workbench/_data`, where nothing is ever written.
"""

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
INSTALLED = (PACKAGE / "_data").is_dir()
DATA = PACKAGE / "_data" if INSTALLED else ROOT / "data"
MODELS = DATA / "models"
CORPORA = DATA / "corpora"
NOTEBOOKS = DATA / "notebooks" if INSTALLED else ROOT / "notebooks"
BUILD = Path.cwd() / "build" if INSTALLED else ROOT / "build"


def runs_folder() -> Path:
    """The folder that the environment variable `WORKBENCH_RUNS` names, else `data/runs`; the user's from a wheel."""
    return Path(os.environ.get("WORKBENCH_RUNS") or _own_runs()).expanduser().resolve()


def _own_runs() -> Path:
    if not INSTALLED:
        return DATA / "runs"
    from platformdirs import user_data_path

    return user_data_path("gpt2-memory-workbench", appauthor=False) / "runs"
