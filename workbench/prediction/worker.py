"""The processes in which predictions are made: started at the first, kept for the next, ended with their caller.

A shadow patches torch and transformers for the whole process, every thread of it, so it has one of its own. An emulated
card has another (`workbench.gpus.emulator.call`).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.errors import WorkbenchError
from workbench.base.launch import Child, ChildPool
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator.call import call_on, fork_of_trunk
from workbench.gpus.emulator.card import call_with_room
from workbench.prediction.prediction import Prediction, PredictionOrError, make_prediction
from workbench.recipe import Recipe
from workbench.training.world import ALONE

if TYPE_CHECKING:
    from workbench.prediction.phases import Habits, Life
    from workbench.training.ranks.shards import Ranks

# Modules that a process loads before it is asked anything: one of shadows, and one of an emulated card.
SHADOW_MODULES = ("workbench.prediction.shadow.step", "workbench.prediction.shadow.replay")
CARD_MODULES = ("workbench.prediction.emulated",)
TIME_LIMIT_S = 120.0  # for one prediction: fifty times what the largest known model takes

SHADOWS = ChildPool()
R = TypeVar("R")


def ask_card(
    gpu: Gpu,
    compute: Callable[..., R],
    recipe: Recipe,
    *request: Any,
    time_limit: float = TIME_LIMIT_S,
) -> R:
    """Call `predict_on_card` or `life_on_card` in the process of this card, and return its answer.

    Raises what `call_on` raises.
    """
    return call_on(gpu, compute, recipe, gpu, *request, modules=CARD_MODULES, time_limit=time_limit)


def ask_shadow(*request: Any, time_limit: float = TIME_LIMIT_S) -> Any:
    """Call `predict_in_shadow` in the process of shadows, and return its answer.

    Raises:
        WorkbenchError: the call raised it.
        UnavailableError: it took longer than so many seconds; the process was ended.
        RuntimeError: the process failed; the end of what it wrote to standard error is in the message.
    """
    return SHADOWS.call("shadow", _start_process, predict_in_shadow, *request, time_limit=time_limit)


def start_shadow() -> None:
    """Start the process of shadows, which loads its libraries while the caller goes on."""
    SHADOWS.start("shadow", _start_process)


def _start_process() -> Child:
    """Start a process of shadows: a fork of the emulator's, which has loaded the libraries already, if there is one."""
    name = "prediction worker"
    return fork_of_trunk(_environment(), name) or Child(_environment(), SHADOW_MODULES, name=name)


def _environment() -> dict[str, str]:
    """Return the caller's environment without GPUs, and without what a launcher or a trainer has left in it."""
    variables = dict(os.environ)
    for name in os.environ:
        if name in ALONE or name.startswith("ACCELERATE_"):
            del variables[name]
    variables |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "EMULATED_GPU", "EMULATED_CARD"), "")
    return {**variables, "TOKENIZERS_PARALLELISM": "false"}


# ---- in such a process ----


def predict_in_shadow(
    recipe: Recipe, gpus: list[str], padding: bool, ranks: "Ranks | None" = None
) -> list[PredictionOrError]:
    """Predict a recipe in the shadow for several devices, in their order. It patches libraries while it runs.

    A device that the recipe cannot be predicted for has the error in the place of its prediction.
    """
    from workbench.prediction.shadow.replay import replay
    from workbench.prediction.shadow.step import trace_for

    answers: list[PredictionOrError] = []
    for name in gpus:
        gpu = GPUS.get(name)  # None is the CPU
        try:
            trace = trace_for(recipe, gpu, padding, ranks)
            numbers = replay(trace, gpu)
            answers.append(make_prediction(recipe, gpu, "predicted", ranks, work=trace.work, **numbers, **trace.facts))
        except WorkbenchError as error:
            answers.append(error)
    return answers


def predict_on_card(recipe: Recipe, gpu: Gpu, padding: bool, ranks: "Ranks | None" = None) -> Prediction:
    """Predict a recipe for the card that this process sees. Where its memory is not enough, the numbers are those of a
    card like it that has enough.

    Raises ConfigurationError: the recipe cannot be predicted, or needs more than any card has.
    """
    import torch

    from workbench.prediction.emulated import predict_by_steps, too_much

    with suppress(torch.OutOfMemoryError):
        return call_with_room(gpu, partial(predict_by_steps, recipe, gpu, padding, ranks))
    raise too_much()  # an error raised in a handler would keep the traceback, and with it the tensors


def life_on_card(recipe: Recipe, gpu: Gpu, habits: "Habits") -> "Life":
    """Predict every phase of a run for the card that this process sees. The caller imports no torch for it."""
    from workbench.prediction.emulated_life import predict_phases

    return predict_phases(recipe, gpu, habits)
