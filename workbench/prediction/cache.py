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
        prediction = _read(folder() / f"{key}.npz")
        if prediction:
            _memory[place] = prediction
    return _memory.get(place)


def put(key: str, prediction: Prediction) -> None:
    """Keep a prediction, in memory only where the folder cannot be written to."""
    _memory[folder(), key] = prediction
    with suppress(UnavailableError), aside(folder(), "predict: a prediction") as part:
        _write(part, prediction)
        put_in_place(part, f"{key}.npz")


def _write(path: Path, prediction: Prediction) -> None:
    import numpy as np

    plain = vars(prediction).copy()
    timeline = plain.pop("timeline")
    phases = np.array([_PHASES.index(phase) for phase in timeline.phases], dtype=np.int8)
    arrays: dict[str, Any] = {**timeline.lives, "phases": phases}
    arrays |= {"plain": np.array(json.dumps(plain)), "operations": np.array(timeline.operations, dtype=np.str_)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=3) as file:  # a fifth of numpy's time, for 6 %
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w") as part:
                np.lib.format.write_array(part, array)


def _read(path: Path) -> Prediction | None:
    import numpy as np

    from workbench.measure.timeline import LIVES, TensorTimeline, live_bytes

    try:
        with np.load(path, allow_pickle=False) as data:
            plain: dict[str, Any] = json.loads(str(data["plain"]))
            lives = {name: data[name] for name in LIVES}
            operations = tuple(map(str, data["operations"]))
            phases = tuple(_PHASES[code] for code in data["phases"])
        timeline = TensorTimeline(live_bytes(lives, len(phases)), phases, lives, operations)
        return Prediction(**plain, timeline=timeline)
    except (OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
        return None
