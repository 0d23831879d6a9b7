"""Predictions that were made before, by key: in memory, and one file each in `predictions/` of the runs' folder."""

import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from workbench.base.categories import Phase
from workbench.base.errors import UnavailableError
from workbench.base.paths import aside, put_in_place, runs_folder
from workbench.prediction.prediction import Prediction

_memory: dict[tuple[Path, str], Prediction] = {}
_PHASES = (None, *Phase)


def folder() -> Path:
    return runs_folder() / "predictions"


def get(key: str) -> Prediction | None:
    """The prediction with this key; None if there is none, or its file is damaged."""
    place = (folder(), key)
    if place not in _memory:
        prediction = read_prediction(folder() / f"{key}.npz")
        if prediction:
            _memory[place] = prediction
    return _memory.get(place)


def put(key: str, prediction: Prediction) -> None:
    """Keep a prediction, in memory only where the folder cannot be written to."""
    _memory[folder(), key] = prediction
    with suppress(UnavailableError), aside(folder(), "predict: a prediction") as part:
        write_prediction(part, prediction)
        put_in_place(part, f"{key}.npz")


def write_prediction(path: Path, prediction: Prediction) -> None:
    """One file of a prediction, with its timeline if it has one."""
    import numpy as np

    plain = vars(prediction).copy()
    timeline = plain.pop("timeline")
    arrays: dict[str, Any] = {"plain": np.array(json.dumps(plain))}
    if timeline is not None:
        phases = np.array([_PHASES.index(phase) for phase in timeline.phases], dtype=np.int8)
        operations = np.array(timeline.operations, dtype=np.str_)
        arrays |= {**timeline.lives, "phases": phases, "operations": operations}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as file:  # a fifth of numpy's time, for 6 %
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array(part, array)


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
            phases = tuple(_PHASES[code] for code in data["phases"])
        timeline = TensorTimeline(live_bytes(lives, len(phases)), phases, lives, operations)
        return Prediction(**plain, timeline=timeline)
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
        return None
