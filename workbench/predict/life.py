"""The whole life of a run, from loading to saving: predicted on an emulated GPU, or measured on a device.

One walk (`predict.walk`) takes the recipe's own Trainer through the phases either way. Importing this does not import
torch.
"""

from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.measure.categories import format_bytes
from workbench.predict.engine import EMULATOR, engine_for
from workbench.predict.phases import Habits, Life
from workbench.predict.predict import CPU, Prediction, predict, resolved
from workbench.predict.worker import SECONDS, ask_life
from workbench.recipe import Recipe

if TYPE_CHECKING:
    import pandas as pd


@cache
def predict_life(recipe: Recipe, gpu: str, habits: Habits, time_limit: float = SECONDS) -> Life:
    """Predict every phase of a run on a GPU, without that GPU or the weights. Answers are kept as long as the process.

    Raises:
        ConfigurationError: the recipe, the GPU or the habits cannot be used.
        UnavailableError: the emulator is not set up, or the time was up.
    """
    if gpu == CPU:
        raise ConfigurationError("life: the phases are predicted for GPUs. Name one, or measure them: --measure cpu.")
    engine_for(gpu, EMULATOR)  # the shadow knows a step alone
    return ask_life(resolved(recipe, [gpu]), find_gpu(gpu), habits, time_limit)


def predict_with_life(recipe: Recipe, gpu: str, habits: Habits) -> Prediction:
    """The prediction of a step, with the peak of the phase that needs most: for a planner who plans for all of them."""
    step, life = predict(recipe, gpu), predict_life(recipe, gpu, habits)
    most, needed = life.highest, life.highest.device_bytes
    if life.refused and step.capacity_bytes:  # perhaps for want of one piece
        needed = max(needed, step.capacity_bytes - step.context_bytes + 1)
    if needed <= (step.peak_reserved_bytes or 0):
        return step
    words = most.phase.replace(" ", "_")
    return replace(step, peak_allocated_bytes=most.allocated_bytes, peak_reserved_bytes=needed, peak_phase=words)


def life_table(*lives: Life) -> "pd.DataFrame":
    """One row for each phase; of each life its bytes, and of two the ratio of those on the device."""
    import pandas as pd

    frames = {life.source: pd.DataFrame(map(asdict, life.peaks)).set_index("phase").astype(float) for life in lives}
    if len(lives) == 2:
        first, second = frames.values()
        frames["ratio"] = (first / second).drop(columns="host_bytes")
    return pd.concat(frames, axis=1).dropna(axis=1, how="all")


def life_text(*lives: Life) -> str:
    """The table, and the verdict over the whole life."""
    table = life_table(*lives).rename(columns=lambda name: name.removesuffix("_bytes"))
    shown = table.apply(lambda column: column.map("{:.3f}".format if column.name[0] == "ratio" else format_bytes))
    recipe = lives[0].recipe
    head = f"{recipe.label} on {recipe.model}, the whole life of a run"
    return "\n".join([head, "", shown.to_string(na_rep="–"), *map(_verdict, lives)])


def _verdict(life: Life) -> str:
    import psutil

    peak, host = life.highest, max(peak.host_bytes for peak in life.peaks)
    how = "predicted, not measured" if life.source.startswith("emulated") else "measured"
    fits = f"NO ({', '.join(life.refused)})" if life.refused else "yes"
    room = f" and about {format_bytes(life.context_bytes)} of context" if life.context_bytes else ""
    room += f", of {format_bytes(life.capacity_bytes)}" if life.capacity_bytes else ""
    return (
        f"\n{life.source} ({how})\n  fits   {fits}: {format_bytes(peak.allocated_bytes)} allocated, "
        f"{format_bytes(peak.device_bytes)} reserved in {peak.phase}{room}\n  host   at most {format_bytes(host)}; "
        f"this machine has {format_bytes(psutil.virtual_memory().total)}"
    )
