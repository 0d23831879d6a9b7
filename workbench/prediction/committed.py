"""Predictions that come with the workbench, in `data/predictions`: the cards of the lessons, which nobody waits for.

Each is a file under a key of what it depends on: recipe, card, the model's config, the versions of the libraries, and
GENERATION. What has no file is predicted, as everywhere. `tests/prediction/test_committed.py` makes some anew.

The environment variable WORKBENCH_PREDICTIONS decides otherwise: `live` takes none of them, `keep` writes those that
are missing, as `tools/lessons.py` does.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace

from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.paths import DATA, aside, put_in_place, versions
from workbench.gpus.catalogue import device_name
from workbench.prediction import cache
from workbench.prediction.predict import CPU, ENGINE_VARIABLE, definition, model_config, predict_all
from workbench.prediction.prediction import Prediction
from workbench.recipe import Recipe

FOLDER = DATA / "predictions"
GENERATION = 1  # raise it by hand when a change of an engine moves a prediction; then make them anew
LIBRARIES = ("torch", "transformers", "accelerate", "peft")
CHOICE = "WORKBENCH_PREDICTIONS"
LIVE = "live"
KEEP = "keep"

Answer = Prediction | WorkbenchError


def known_predictions(recipe: Recipe, gpus: Sequence[str], *, timeline: bool = False) -> list[Answer]:
    """As `predict_all`, for cards of the catalogue, without waiting for those that come with the workbench.

    Args:
        timeline: with the step, to drag through, which few of them have.

    Raises what `predict_all` raises.
    """
    gpus = [device_name(gpu) for gpu in gpus]
    choice = os.environ.get(CHOICE, "")
    # which kernels a CPU takes is its own affair: nobody else's answer is on file
    if choice == LIVE or os.environ.get(ENGINE_VARIABLE) or CPU in gpus:
        return predict_all(recipe, gpus)
    answers: dict[str, Answer] = {}
    for gpu in gpus:
        answer = on_file(key(recipe, gpu), timeline)
        if answer is not None:
            answers[gpu] = answer
    missing = [gpu for gpu in gpus if gpu not in answers]
    if choice == KEEP:
        for gpu in answers:
            _mark_used(key(recipe, gpu))
    if missing:
        answers |= dict(zip(missing, predict_all(recipe, missing), strict=True))
    if choice == KEEP:
        for gpu in missing:
            put_on_file(recipe, gpu, answers[gpu], timeline)
    return [answers[gpu] for gpu in gpus]


def key(recipe: Recipe, gpu: str) -> str:
    """Of a build of a library (`2.13.0+cpu`) its release counts: a prediction is for another device anyway."""
    release = {name: versions()[name].partition("+")[0] for name in LIBRARIES}
    others = [definition(type(technique)) for technique in recipe.techniques]
    facts = [GENERATION, recipe.to_dict(), gpu, release, model_config(recipe.model), others]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def on_file(name: str, timeline: bool) -> Answer | None:
    """The answer with this key; None if there is none, or none with a timeline."""
    refusal = FOLDER / f"{name}.json"
    if refusal.is_file():
        return ConfigurationError(json.loads(refusal.read_text(encoding="utf-8"))["refused"])
    prediction = cache.read_prediction(FOLDER / f"{name}.npz")
    if prediction is None or (timeline and prediction.timeline is None):
        return None
    return prediction


def put_on_file(recipe: Recipe, gpu: str, answer: Answer, timeline: bool) -> None:
    """A file of a thousand bytes, or of some ten thousand with a timeline; of a refusal its words."""
    name = key(recipe, gpu)
    with aside(FOLDER, "predict: a prediction") as part:
        if isinstance(answer, Prediction):
            cache.write_prediction(part, answer if timeline else replace(answer, timeline=None))
            put_in_place(part, f"{name}.npz")
        elif isinstance(answer, ConfigurationError):
            facts = {"recipe": recipe.to_dict(), "gpu": gpu, "refused": str(answer)}
            part.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            put_in_place(part, f"{name}.json")


def _mark_used(name: str) -> None:
    """So that those nobody asks for any more can be told by their date."""
    for file in FOLDER.glob(f"{name}.*"):
        file.touch()
