"""The processes in which predictions are made: started at the first, kept for the next, ended with their caller.

A shadow patches torch and transformers for the whole process, every thread of it, so it has one of its own. An emulated
card has another (`workbench.gpus.emulator.call`).
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.base.errors import WorkbenchError, explained
from workbench.base.launch import Child, Kept
from workbench.gpus.catalogue import Gpu
from workbench.recipe import Recipe
from workbench.training.world import ALONE

if TYPE_CHECKING:
    from workbench.prediction.phases import Habits, Life
    from workbench.prediction.prediction import Prediction
    from workbench.ranks.shards import Ranks

MODULES = ("workbench.prediction.prediction", "workbench.prediction.shadow.step")
ON_CARD = ("workbench.prediction.emulated",)
CANNOT = "predict: this recipe cannot be run on an emulated GPU"
SECONDS = 120.0  # seconds for a prediction: fifty times what the largest known model takes

SHADOWS = Kept()
R = TypeVar("R")


def ask_emulator(recipe: Recipe, gpu: Gpu, *request: Any, time_limit: float = SECONDS) -> "Prediction | WorkbenchError":
    """The prediction of PyTorch's own allocator, in the process of this card. Raises RuntimeError: it failed."""
    try:
        return _ask_card(compute_emulated, recipe, gpu, *request, time_limit=time_limit)
    except WorkbenchError as error:
        return error


def ask_life(recipe: Recipe, gpu: Gpu, habits: "Habits", time_limit: float = SECONDS) -> "Life":
    """The life of a run, in the process of this card. Raises as `call_on`."""
    return _ask_card(compute_life, recipe, gpu, habits, time_limit=time_limit)


def _ask_card(
    compute: Callable[..., R],
    recipe: Recipe,
    gpu: Gpu,
    *request: Any,
    time_limit: float,
) -> R:
    from workbench.gpus.emulator.call import call_on

    return call_on(gpu, compute, recipe, gpu, *request, modules=ON_CARD, time_limit=time_limit)


def ask(*request: Any, time_limit: float = SECONDS) -> Any:
    """What `predict.prediction.compute` returns in the worker for these arguments.

    Raises:
        WorkbenchError: as raised there.
        UnavailableError: it took longer than so many seconds; the worker was ended.
        RuntimeError: the worker failed; the end of what it wrote to standard error is in the message.
    """
    from workbench.prediction.prediction import compute

    return SHADOWS.call("shadow", _started, compute, *request, time_limit=time_limit)


def start_shadow() -> None:
    """Start the process of shadows: it loads its libraries meanwhile."""
    SHADOWS.start("shadow", _started)


def start_card(gpu: Gpu) -> None:
    """The same of this card's process."""
    from workbench.gpus.emulator.call import start_process

    start_process(gpu, ON_CARD)


def _started() -> Child:
    """A fork of the emulator's process, if there is one: it has loaded the libraries already."""
    from workbench.gpus.emulator.call import fork_of_trunk

    name = "prediction worker"
    return fork_of_trunk(_environment(), name) or Child(_environment(), MODULES, name=name)


def _environment() -> dict[str, str]:
    """The caller's, without GPUs, and without what a launcher or a trainer in the caller has left there."""
    kept = {name: value for name, value in os.environ.items() if not (name in ALONE or name.startswith("ACCELERATE_"))}
    no_gpu = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "EMULATED_GPU", "EMULATED_CARD"), "")
    return {**kept, **no_gpu, "TOKENIZERS_PARALLELISM": "false"}


# ---- in the process of a card ----


def compute_emulated(recipe: Recipe, gpu: Gpu, padding: bool, ranks: "Ranks | None" = None) -> "Prediction":
    """The prediction for the card that this process sees: to be called under the emulator only."""
    from workbench.prediction.emulated import predict_here

    with explained(CANNOT, "Measure it with `run`, or leave out what brings this."):
        return predict_here(recipe, gpu, padding, ranks)


def compute_life(recipe: Recipe, gpu: Gpu, habits: "Habits") -> "Life":
    """The same of a run's whole life."""
    from workbench.prediction.emulated_life import life_here

    with explained(CANNOT, "Measure it with --measure, or leave out what brings this."):
        return life_here(recipe, gpu, habits)
