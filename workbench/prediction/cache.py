"""Predictions that were made before, by key: one file each in `predictions/` of the runs' folder."""

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
from workbench.base.paths import PACKAGE, aside, put_in_place, runs_folder
from workbench.models.source import RANDOM
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe

_PHASES = (None, *Phase)


def get(key: str) -> Prediction | None:
    """The prediction with this key; None if there is none, or its file is damaged."""
    return read_prediction(_file(key))


def put(key: str, prediction: Prediction) -> None:
    """Keep a prediction, where the folder can be written to."""
    with suppress(UnavailableError):
        write_prediction(_file(key), prediction)


def _file(key: str) -> Path:
    return runs_folder() / "predictions" / f"{key}.npz"


# ---- keys ----


def digest(*facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def what_may_change(recipe: Recipe) -> tuple[str, list[str]]:
    """What a recipe names, and whoever owns it may change: the config of a model in a folder, and techniques that are
    not the workbench's."""
    # `os.path` takes any text at all, which `pathlib` does not
    folder = os.path.expanduser(recipe.model.removeprefix(RANDOM))
    config = ""
    for name in ("config.json", "adapter_config.json"):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            config += Path(path).read_text(encoding="utf-8")
    return config, [_definition(type(technique)) for technique in recipe.techniques]


def _definition(technique_class: type) -> str:
    """The file of a technique, or what a notebook has defined; empty for the workbench's own."""
    import dill

    if technique_class.__module__.partition(".")[0] == PACKAGE.name:
        return ""
    file = getattr(sys.modules[technique_class.__module__], "__file__", None)
    definition = dill.dumps(technique_class, recurse=True) if file is None else Path(file).read_bytes()
    return hashlib.sha256(definition).hexdigest()


# ---- files ----


def write_prediction(path: Path, prediction: Prediction) -> None:
    """One file of a prediction, with its timeline if it has one. Raises UnavailableError: it cannot be written."""
    import numpy as np

    plain = vars(prediction).copy()
    timeline = plain.pop("timeline")
    arrays: dict[str, Any] = {"plain": np.array(json.dumps(plain))}
    if timeline is not None:
        phases = np.array(list(map(_PHASES.index, timeline.phases)), dtype=np.int8)
        operations = np.array(timeline.operations, dtype=np.str_)
        arrays |= {**timeline.lives, "phases": phases, "operations": operations}
    with aside(path.parent, "predict: a prediction") as part:
        with part.open("wb") as file:  # a path would get an ending
            np.savez_compressed(file, **arrays)
        put_in_place(part, path.name)


def read_prediction(path: Path) -> Prediction | None:
    """The prediction in a file; None if there is none, or it is damaged."""
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
