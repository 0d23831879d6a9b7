"""Where the workbench keeps things: the embedded models and texts, and the learner's own runs."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
MODELS = DATA / "models"
CORPORA = DATA / "corpora"
NOTEBOOKS = ROOT / "notebooks"
BUILD = ROOT / "build"


def runs_folder() -> Path:
    """`data/runs`, or the folder that the environment variable `WORKBENCH_RUNS` names."""
    return Path(os.environ.get("WORKBENCH_RUNS") or DATA / "runs").expanduser().resolve()
