"""The whole life of a run, from loading to saving, on an emulated GPU. Importing this does not import torch."""

from dataclasses import replace
from functools import cache

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS, device_name
from workbench.prediction.phases import Habits, Life
from workbench.prediction.predict import CPU, EMULATOR, Prediction, engine_for, predict, resolve_model
from workbench.prediction.worker import ask_card, life_on_card
from workbench.recipe import Recipe


@cache
def predict_life(recipe: Recipe, gpu: str, habits: Habits) -> Life:
    """Predict every phase of a run on a GPU, without that GPU or the weights. This process remembers the answers.

    Raises:
        ConfigurationError: the recipe, the GPU or the habits cannot be used. Habits cannot be if their new tokens leave
            no room for a prompt.
        UnavailableError: the emulator is not set up, or the time was up.
    """
    gpu = device_name(gpu)
    if gpu == CPU:
        raise ConfigurationError("life: the phases are predicted for GPUs. Name one.")
    length = recipe.sequence_length
    new = habits.max_new_tokens
    if new >= length:
        raise ConfigurationError(f"life: max_new_tokens must be below the sequence_length, {length}, got {new}.")
    engine_for(gpu, EMULATOR)  # raises without the emulator, since the shadow knows training steps alone
    return ask_card(GPUS[gpu], life_on_card, resolve_model(recipe, [gpu]), habits)


def predict_with_life(recipe: Recipe, gpu: str, habits: Habits) -> Prediction:
    """Predict a step, and put the phase that needs most of the device in the place of its peak: a planner's predictor
    that plans for all phases."""
    step = predict(recipe, gpu)
    life = predict_life(recipe, gpu, habits)
    peak = life.highest
    needed_bytes = peak.reserved_bytes
    if life.refused and step.capacity_bytes:
        # Such a phase may need less than the card has, and have failed for want of one piece. It does not fit either.
        needed_bytes = max(needed_bytes, step.capacity_bytes - step.context_bytes + 1)
    if needed_bytes <= (step.peak_reserved_bytes or 0):
        return step
    return replace(
        step,
        peak_allocated_bytes=peak.allocated_bytes,
        peak_reserved_bytes=needed_bytes,
        peak_phase=peak.phase.replace(" ", "_"),
    )
