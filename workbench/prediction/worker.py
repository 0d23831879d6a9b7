"""The processes in which predictions are made: started at the first, kept for the next, ended with their caller.

A shadow patches torch and transformers for the whole process, every thread of it, so it has one of its own. An emulated
card has another (`workbench.gpus.emulator.call`).
"""

import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.errors import WorkbenchError
from workbench.base.launch import Child, Kept
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator.call import call_on, fork_of_trunk, start_process
from workbench.gpus.emulator.card import with_room
from workbench.prediction.prediction import Answer, Prediction, prediction_of
from workbench.recipe import Recipe
from workbench.training.world import ALONE

if TYPE_CHECKING:
    from workbench.prediction.phases import Habits, Life
    from workbench.training.ranks.shards import Ranks

MODULES = ("workbench.prediction.shadow.step", "workbench.prediction.shadow.replay")
ON_CARD = ("workbench.prediction.emulated",)
SECONDS = 120.0  # seconds for a prediction: fifty times what the largest known model takes

SHADOWS = Kept()
R = TypeVar("R")


def ask_card(
    gpu: Gpu,
    compute: Callable[..., R],
    recipe: Recipe,
    *request: Any,
    time_limit: float = SECONDS,
) -> R:
    """What `predict_on_card` or `life_on_card` returns in the process of this card. Raises as `call_on`."""
    return call_on(gpu, compute, recipe, gpu, *request, modules=ON_CARD, time_limit=time_limit)


def ask_shadow(*request: Any, time_limit: float = SECONDS) -> Any:
    """What `of_shadow` returns in the process of shadows.

    Raises:
        WorkbenchError: as raised there.
        UnavailableError: it took longer than so many seconds; the worker was ended.
        RuntimeError: the worker failed; the end of what it wrote to standard error is in the message.
    """
    return SHADOWS.call("shadow", _started, of_shadow, *request, time_limit=time_limit)


def start_shadow() -> None:
    """Start the process of shadows: it loads its libraries meanwhile."""
    SHADOWS.start("shadow", _started)


def start_card(gpu: Gpu) -> None:
    """The same of this card's process."""
    start_process(gpu, ON_CARD)


def _started() -> Child:
    """A fork of the emulator's process, if there is one: it has loaded the libraries already."""
    name = "prediction worker"
    return fork_of_trunk(_environment(), name) or Child(_environment(), MODULES, name=name)


def _environment() -> dict[str, str]:
    """The caller's, without GPUs, and without what a launcher or a trainer in the caller has left there."""
    variables = dict(os.environ)
    for name in os.environ:
        if name in ALONE or name.startswith("ACCELERATE_"):
            del variables[name]
    variables |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "EMULATED_GPU", "EMULATED_CARD"), "")
    return {**variables, "TOKENIZERS_PARALLELISM": "false"}


# ---- in such a process ----


def of_shadow(recipe: Recipe, gpus: list[str], padding: bool, ranks: "Ranks | None" = None) -> list[Answer]:
    """The predictions of the shadow. It patches libraries while it runs."""
    from workbench.prediction.shadow.replay import replay
    from workbench.prediction.shadow.step import trace_for

    answers: list[Answer] = []
    for name in gpus:
        gpu = GPUS.get(name)  # none: the CPU
        try:
            trace = trace_for(recipe, gpu, padding, ranks)
            numbers = replay(trace, gpu)
            answers.append(prediction_of(recipe, gpu, "predicted", ranks, work=trace.work, **numbers, **trace.facts))
        except WorkbenchError as error:
            answers.append(error)
    return answers


def predict_on_card(recipe: Recipe, gpu: Gpu, padding: bool, ranks: "Ranks | None" = None) -> Prediction:
    """The prediction for the card that this process sees. Where its memory is not enough, the numbers are those of a
    card like it that has enough."""
    import torch

    from workbench.prediction.emulated import predict_here, too_much

    try:
        return with_room(gpu, partial(predict_here, recipe, gpu, padding, ranks))
    except torch.OutOfMemoryError:
        raise too_much() from None


def life_on_card(recipe: Recipe, gpu: Gpu, habits: "Habits") -> "Life":
    from workbench.prediction.emulated_life import life_here

    return life_here(recipe, gpu, habits)
