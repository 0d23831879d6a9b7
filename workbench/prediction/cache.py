"""Predictions that were made before: each has a file under its key, in `predictions/` of the runs' folder."""

import hashlib
import json
import os
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.categories import Phase
from workbench.base.errors import UnavailableError
from workbench.base.paths import PACKAGE, part_file, put_in_place, runs_folder
from workbench.models.source import RANDOM
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe

_PHASES = (None, *Phase)


def get(key: str) -> Prediction | None:
    """Return the prediction with this key, or None if there is none or its file is damaged."""
    return read_prediction(_file(key))


def put(key: str, prediction: Prediction) -> None:
    """Write the prediction of a key, where the folder can be written to."""
    with suppress(UnavailableError):
        write_prediction(_file(key), prediction)


def _file(key: str) -> Path:
    return runs_folder() / "predictions" / f"{key}.npz"


# ---- keys ----


def digest(*facts: Any) -> str:
    """Return the SHA-256 of facts that JSON can hold."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_changeable(recipe: Recipe) -> tuple[str, list[str]]:
    """Return what a recipe only names and its owner may change at any time.

    These are the text of the config, if the model is a folder, and a digest of each technique that is not the
    workbench's own.
    """
    # A model's name may be any text at all: `os.path` takes it, and `pathlib` does not.
    folder = os.path.expanduser(recipe.model.removeprefix(RANDOM))
    config = ""
    for name in ("config.json", "adapter_config.json"):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            config += Path(path).read_text(encoding="utf-8")
    return config, [_definition(type(technique)) for technique in recipe.techniques]


def _definition(technique_class: type) -> str:
    """Return a digest of a technique's file, or of the class if a notebook has defined it. The workbench's own have
    none: the key has the workbench's code, or its GENERATION."""
    import dill

    if technique_class.__module__.partition(".")[0] == PACKAGE.name:
        return ""
    file = getattr(sys.modules[technique_class.__module__], "__file__", None)
    definition = dill.dumps(technique_class, recurse=True) if file is None else Path(file).read_bytes()
    return hashlib.sha256(definition).hexdigest()


# ---- files ----


def write_prediction(path: Path, prediction: Prediction) -> None:
    """Write a prediction into one file, with its timeline if it has one.

    Raises UnavailableError: the file cannot be written.
    """
    import numpy as np

    plain = vars(prediction).copy()
    timeline = plain.pop("timeline")
    arrays: dict[str, Any] = {"plain": np.array(json.dumps(plain))}
    if timeline is not None:
        phases = np.array(list(map(_PHASES.index, timeline.phases)), dtype=np.int8)
        operations = np.array(timeline.operations, dtype=np.str_)
        arrays |= {**timeline.lives, "phases": phases, "operations": operations}
    with part_file(path.parent, "predict: a prediction") as part:
        with part.open("wb") as file:  # given a path, NumPy would add an ending to it
            np.savez_compressed(file, **arrays)
        put_in_place(part, path.name)


def read_prediction(path: Path) -> Prediction | None:
    """Return the prediction in a file, or None if there is no such file or it is damaged."""
    import numpy as np

    from workbench.measure.timeline import LIVES, TensorTimeline, live_bytes

    try:
        with np.load(path, allow_pickle=False) as data:
            plain: dict[str, Any] = json.loads(str(data["plain"]))
            if "phases" not in data:
                return Prediction(**plain)
            lives = {name: data[name] for name in LIVES}
            operations = tuple(map(str, data["operations"]))
            phases = tuple(map(_PHASES.__getitem__, data["phases"]))
        timeline = TensorTimeline(live_bytes(lives, len(phases)), phases, lives, operations)
        return Prediction(**plain, timeline=timeline)
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
        return None
