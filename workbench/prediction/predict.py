"""`predict(recipe, gpu="h100")`: the memory that a training step will need on a GPU, without that GPU or the weights.

Two engines make it, each in a process of its own. The *emulator* runs a few steps on PyTorch's CUDA build and its own
allocator, on a GPU in software (`gpus.emulator`): exact, where it is set up. The *shadow* runs the recipe's own step on
fake tensors (`prediction.shadow`) with the kernels that the GPU would choose, and every allocation goes through a model
of that allocator: everywhere, and for this machine's CPU. The environment variable WORKBENCH_ENGINE chooses for all
calls.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from workbench.base.device import CPU, Device
from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.paths import PACKAGE, versions
from workbench.gpus.catalogue import COMMON, GPUS, device_name, of_device
from workbench.gpus.emulator import place
from workbench.models.source import EMBEDDED, check_positions, known_positions
from workbench.prediction import cache as prediction_cache
from workbench.prediction.prediction import Answer, Prediction
from workbench.prediction.worker import SECONDS, ask_card, ask_shadow, predict_on_card, start_card, start_shadow
from workbench.recipe import Recipe
from workbench.training.ranks.shards import Ranks, ranks_for

__all__ = ["CPU", "EMULATOR", "ENGINES", "SHADOW", "Prediction", "engine_for", "predict", "predict_all"]


GPU_NAMES = tuple(COMMON)
EMULATOR = "emulator"
SHADOW = "shadow"
ENGINES = (EMULATOR, SHADOW)
NEWEST = "b200"  # which lacks nothing that another card has
ENGINE_VARIABLE = "WORKBENCH_ENGINE"  # chooses for all calls


def predict(
    recipe: Recipe,
    gpu: str = "h100",
    *,
    padding: bool = False,
    engine: str | None = None,
    time_limit: float = SECONDS,
    ranks: int | None = None,
    shard: str = "none",
) -> Prediction:
    """Predict the memory of a recipe's training step.

    Args:
        gpu: a card of `workbench.gpus.catalogue.GPUS` by its name, or `"cpu"` for this machine's own kernels.
        padding: batches contain padding, although no technique of the recipe brings any.
        engine: `"emulator"` or `"shadow"`; by default the emulator where it is set up.
        time_limit: in seconds, for what was not predicted before.
        ranks: predict one of so many that share the batch, as `run_on_ranks` has them; None is a process alone.
        shard: what each of them keeps of the model, a name of `ranks/shards.toml`.

    Raises:
        ConfigurationError: ranks that cannot share the batch or the model, an unknown GPU or engine; a model, a length
            or a precision that cannot be used; or an operation that cannot be traced, with its name and its module.
        UnavailableError: the config of a hub model cannot be had, the emulator asked for is not set up, or the time
            was up: the process was ended, and the next prediction starts another.
    """
    (answer,) = predict_all(
        recipe,
        [gpu],
        padding=padding,
        engine=engine,
        time_limit=time_limit,
        ranks=ranks,
        shard=shard,
    )
    if isinstance(answer, WorkbenchError):
        raise answer
    return answer


def predict_all(
    recipe: Recipe,
    gpus: Iterable[str] = GPU_NAMES,
    *,
    padding: bool = False,
    engine: str | None = None,
    time_limit: float = SECONDS,
    ranks: int | None = None,
    shard: str = "none",
) -> list[Answer]:
    """As `predict`, for several GPUs in their order; in place of one that cannot run the recipe stands the error.

    The limit is for each of them.
    """
    names = list(map(device_name, gpus))
    recipe = resolved(recipe, names)
    sharing = None
    if ranks is not None or shard != "none":
        sharing = ranks_for(recipe, ranks, shard)
    request = (padding, sharing)
    engines = {name: engine_for(name, engine) for name in names}
    answers: dict[str, Answer] = {}
    keys: dict[str, str] = {}  # of what is not known yet
    for name in names:
        reason = ""
        if name != CPU:
            reason = why_not_on(recipe, name, engines[name])
        key = _key(recipe, name, *request, engines[name])
        earlier = prediction_cache.get(key)
        if reason:
            answers[name] = ConfigurationError(f"predict: {reason}")
        elif earlier:
            answers[name] = earlier
        else:
            keys[name] = key
    shadowed = [name for name in keys if engines[name] == SHADOW]
    if shadowed:  # one step serves several cards
        shadows = ask_shadow(recipe, shadowed, *request, time_limit=time_limit * len(shadowed))
        answers |= zip(shadowed, shadows, strict=True)
    for name, key in keys.items():
        if engines[name] == EMULATOR:
            try:
                answers[name] = ask_card(GPUS[name], predict_on_card, recipe, *request, time_limit=time_limit)
            except WorkbenchError as error:
                answers[name] = error
        answer = answers[name]
        if isinstance(answer, Prediction):
            prediction_cache.put(key, answer)
    return [answers[name] for name in names]


def engine_for(gpu: str, engine: str | None = None) -> str:
    """`"emulator"` or `"shadow"`: as asked, as the environment says, or the emulator where it is set up.

    Raises:
        ConfigurationError: no such engine, or the emulator for the CPU.
        UnavailableError: the emulator was asked for and is not set up.
    """
    if engine == EMULATOR and gpu == CPU:
        raise ConfigurationError("predict: the emulator plays GPUs. Leave out the engine, or name a GPU.")
    chosen = engine or os.environ.get(ENGINE_VARIABLE, "")
    if gpu == CPU and not engine:
        chosen = SHADOW
    if not chosen:
        return EMULATOR if place.is_set_up() else SHADOW
    if chosen not in ENGINES:
        raise ConfigurationError(f"predict: engine {chosen!r} is not one of {', '.join(ENGINES)}.")
    if chosen == EMULATOR:
        place.stub_folder()
    return chosen


def why_not(recipe: Recipe, gpu: str) -> str:
    """Why a recipe cannot be predicted, or run, on such a device, as far as that is known before anything is predicted:
    for want of positions, of bf16 in hardware, of an engine. Empty: nothing is known against it. No hub is asked.

    What this machine alone lacks, as a package, is no reason. Raises ConfigurationError for an unknown device.
    """
    gpu = device_name(gpu)
    positions = known_positions(recipe.model)
    taken = {technique.name: technique.positions for technique in recipe.techniques if technique.positions}
    try:
        if positions:
            check_positions(recipe.model, positions, recipe.sequence_length, taken)
    except ConfigurationError as error:
        return str(error)
    return why_not_on(recipe, gpu, engine_for(gpu))


def why_not_on(recipe: Recipe, gpu: str, engine: str) -> str:
    """The same of its techniques alone."""
    device = Device(CPU, CPU)
    if gpu in GPUS:
        device = GPUS[gpu].device
    for technique in recipe.techniques:
        reason = technique.missing(device)
        if reason and reason != technique.missing(GPUS[NEWEST].device):
            return reason
        if technique.untraceable and (reason or engine == SHADOW):
            return technique.untraceable
    return ""


def warm_predictions(gpu: str = "h100") -> None:
    """Start the process that predictions for this GPU will come from: it loads its libraries meanwhile."""
    if engine_for(gpu) == EMULATOR:
        start_card(GPUS[device_name(gpu)])
    else:
        start_shadow()


def predicted_peak(recipe_settings: Mapping[str, Any], device: Device) -> int | None:
    """Bytes predicted for the recipe of a record, on the device that it was measured on; None where that cannot be
    predicted."""
    name = CPU
    if device.kind != CPU:
        card = of_device(device.name, device.total_bytes)
        if card is None or device.kind != "cuda":
            return None
        name = card.name
    with suppress(WorkbenchError):
        return predict(Recipe.from_dict(recipe_settings), name).peak_allocated_bytes
    return None


def resolved(recipe: Recipe, gpus: list[str]) -> Recipe:
    """The recipe with the model that `run` takes for `auto` on such a device."""
    if recipe.model != "auto":
        return recipe
    return replace(recipe, model=EMBEDDED if gpus == [CPU] else "gpt2")


def _key(recipe: Recipe, gpu: str, padding: bool, ranks: Ranks | None, engine: str) -> str:
    """Cache key: changes with recipe, GPU, versions of the libraries, the workbench's own code, the model's config."""
    facts = [recipe.to_dict(), gpu, padding, str(ranks), engine, versions(), _own_code()]
    return prediction_cache.digest(*facts, *prediction_cache.what_may_change(recipe))[:24]


@cache
def _own_code() -> str:
    digest = hashlib.sha256()
    paths: list[Path] = []
    for ending in ("py", "json", "toml", "[ch]"):  # the emulator's stubs are C
        paths += PACKAGE.rglob(f"*.{ending}")
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()
