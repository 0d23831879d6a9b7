"""The whole life of a run, from loading to saving, on an emulated GPU. Importing this does not import torch."""

from dataclasses import replace
from functools import cache

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS, device_name
from workbench.prediction.phases import Habits, Life
from workbench.prediction.predict import CPU, EMULATOR, Prediction, engine_for, predict, resolved
from workbench.prediction.worker import ask_card, life_on_card
from workbench.recipe import Recipe


@cache
def predict_life(recipe: Recipe, gpu: str, habits: Habits) -> Life:
    """Predict every phase of a run on a GPU, without that GPU or the weights. Answers are kept as long as the process.

    Raises:
        ConfigurationError: the recipe, the GPU or the habits cannot be used: new tokens leave no room for a prompt.
        UnavailableError: the emulator is not set up, or the time was up.
    """
    gpu = device_name(gpu)
    if gpu == CPU:
        raise ConfigurationError("life: the phases are predicted for GPUs. Name one.")
    length = recipe.sequence_length
    new = habits.max_new_tokens
    if new >= length:
        raise ConfigurationError(f"life: max_new_tokens must be below the sequence_length, {length}, got {new}.")
    engine_for(gpu, EMULATOR)  # the shadow knows a step alone
    return ask_card(GPUS[gpu], life_on_card, resolved(recipe, [gpu]), habits)


def predict_with_life(recipe: Recipe, gpu: str, habits: Habits) -> Prediction:
    """The prediction of a step, with the peak of the phase that needs most: for a planner who plans for all of them."""
    step = predict(recipe, gpu)
    life = predict_life(recipe, gpu, habits)
    peak = life.highest
    needed_bytes = peak.reserved_bytes
    if life.refused and step.capacity_bytes:  # perhaps for want of one piece
        needed_bytes = max(needed_bytes, step.capacity_bytes - step.context_bytes + 1)
    if needed_bytes <= (step.peak_reserved_bytes or 0):
        return step
    return replace(
        step,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=needed_bytes,
        peak_phase=peak.phase.replace(" ", "_"),
    )
