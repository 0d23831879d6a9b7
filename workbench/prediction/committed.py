"""Predictions that come with the workbench, in `data/predictions`: the cards of the lessons, which nobody waits for.

Each is a file under a key of what it depends on: recipe, card, the model's config, the versions of the libraries, and
GENERATION. What has no file is predicted, as everywhere. `tests/prediction/test_committed.py` makes some anew.

The environment variable WORKBENCH_PREDICTIONS decides otherwise: `live` takes none of them, `keep` writes those that
are missing, as `tools/lessons.py` does.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workbench.base.paths import DATA, versions
from workbench.gpus.catalogue import device_name
from workbench.prediction import cache
from workbench.prediction.predict import CPU, ENGINE_VARIABLE, predict_all
from workbench.prediction.prediction import Prediction, PredictionOrError
from workbench.recipe import Recipe

FOLDER = DATA / "predictions"
# Raise this number by hand when a change of an engine moves a prediction, and make the files anew.
GENERATION = 1
# Libraries whose releases decide a prediction.
LIBRARIES = ("torch", "transformers", "accelerate", "peft")
CHOICE = "WORKBENCH_PREDICTIONS"
LIVE = "live"
KEEP = "keep"


def known_predictions(recipe: Recipe, gpus: Sequence[str], *, timeline: bool = False) -> list[PredictionOrError]:
    """Predict a recipe for several devices as `predict_all` does, but read what comes with the workbench from files.

    Args:
        timeline: whether each prediction must have the timeline of its step, which few of the files have.

    Raises what `predict_all` raises.
    """
    gpus = list(map(device_name, gpus))
    choice = os.environ.get(CHOICE, "")
    # Every CPU has kernels of its own, so that no file has an answer for it.
    if choice == LIVE or os.environ.get(ENGINE_VARIABLE) or CPU in gpus:
        return predict_all(recipe, gpus)
    answers: dict[str, PredictionOrError] = {}
    missing: dict[str, Path] = {}
    for gpu in gpus:
        file = FOLDER / f"{key(recipe, gpu)}.npz"
        prediction = cache.read_prediction(file)
        if prediction is None or (timeline and not prediction.timeline):
            missing[gpu] = file
            continue
        answers[gpu] = prediction
        if choice == KEEP:
            file.touch()  # a file that nobody asks for any more keeps its old date
    for gpu, answer in zip(missing, predict_all(recipe, list(missing)), strict=True):
        answers[gpu] = answer
        if choice == KEEP and isinstance(answer, Prediction):
            cache.write_prediction(missing[gpu], answer if timeline else replace(answer, timeline=None))
    return [answers[gpu] for gpu in gpus]


def key(recipe: Recipe, gpu: str) -> str:
    """Return the key of a committed prediction: a digest of everything that it depends on.

    Of a library's version (`2.13.0+cpu`) the release alone counts, without the build: a prediction is for another
    device anyway.
    """
    release = {name: versions()[name].partition("+")[0] for name in LIBRARIES}
    facts = [GENERATION, recipe.to_dict(), gpu, release]
    return cache.digest(*facts, *cache.read_changeable(recipe))[:16]
