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
from workbench.prediction.prediction import Answer, Prediction
from workbench.recipe import Recipe

FOLDER = DATA / "predictions"
# raise it by hand when a change of an engine moves a prediction; then make them anew
GENERATION = 1
LIBRARIES = ("torch", "transformers", "accelerate", "peft")
CHOICE = "WORKBENCH_PREDICTIONS"
LIVE = "live"
KEEP = "keep"


def known_predictions(recipe: Recipe, gpus: Sequence[str], *, timeline: bool = False) -> list[Answer]:
    """As `predict_all`, for cards of the catalogue, without waiting for those that come with the workbench.

    Args:
        timeline: with the step, to drag through, which few of them have.

    Raises what `predict_all` raises.
    """
    gpus = list(map(device_name, gpus))
    choice = os.environ.get(CHOICE, "")
    # which kernels a CPU takes is its own affair: nobody else's answer is on file
    if choice == LIVE or os.environ.get(ENGINE_VARIABLE) or CPU in gpus:
        return predict_all(recipe, gpus)
    answers: dict[str, Answer] = {}
    missing: dict[str, Path] = {}
    for gpu in gpus:
        file = FOLDER / f"{key(recipe, gpu)}.npz"
        prediction = cache.read_prediction(file)
        if prediction is None or (timeline and not prediction.timeline):
            missing[gpu] = file
            continue
        answers[gpu] = prediction
        if choice == KEEP:
            file.touch()  # those that nobody asks for any more can be told by their date
    for gpu, answer in zip(missing, predict_all(recipe, list(missing)), strict=True):
        answers[gpu] = answer
        if choice == KEEP and isinstance(answer, Prediction):
            cache.write_prediction(missing[gpu], answer if timeline else replace(answer, timeline=None))
    return [answers[gpu] for gpu in gpus]


def key(recipe: Recipe, gpu: str) -> str:
    """Of a build of a library (`2.13.0+cpu`) its release counts: a prediction is for another device anyway."""
    release = {name: versions()[name].partition("+")[0] for name in LIBRARIES}
    facts = [GENERATION, recipe.to_dict(), gpu, release]
    return cache.digest(*facts, *cache.what_may_change(recipe))[:16]
