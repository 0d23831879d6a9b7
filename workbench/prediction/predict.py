"""`predict(recipe, gpu="h100")`: the memory that a training step will need on a GPU, without that GPU or the weights.

Two engines predict, each in a process of its own. The *emulator* runs a few steps on PyTorch's CUDA build and its own
allocator, on an emulated GPU (`gpus.emulator`): exact, where it is set up. The *shadow* runs the recipe's own step on
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
from workbench.gpus.catalogue import COMMON, GPUS, device_name, recognize_gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.call import start_trunk
from workbench.models.source import EMBEDDED, check_positions, known_positions
from workbench.prediction import cache as prediction_cache
from workbench.prediction.prediction import Prediction, PredictionOrError
from workbench.prediction.worker import CARD_MODULES, TIME_LIMIT_S, ask_card, ask_shadow, predict_on_card, start_shadow
from workbench.recipe import Recipe
from workbench.training.ranks.shards import Ranks, ranks_for

__all__ = ["CPU", "EMULATOR", "ENGINES", "SHADOW", "Prediction", "engine_for", "predict", "predict_all"]


GPU_NAMES = tuple(COMMON)
EMULATOR = "emulator"
SHADOW = "shadow"
ENGINES = (EMULATOR, SHADOW)
NEWEST = "b200"  # the card that lacks nothing which another card has
ENGINE_VARIABLE = "WORKBENCH_ENGINE"  # chooses for all calls


def predict(
    recipe: Recipe,
    gpu: str = "h100",
    *,
    padding: bool = False,
    engine: str | None = None,
    time_limit: float = TIME_LIMIT_S,
    ranks: int | None = None,
    shard: str = "none",
) -> Prediction:
    """Predict the memory of a recipe's training step.

    Args:
        gpu: a card of `workbench.gpus.catalogue.GPUS` by its name, or `"cpu"` for this machine's own kernels.
        padding: whether batches contain padding although no technique of the recipe brings any.
        engine: `"emulator"` or `"shadow"`; by default the emulator where it is set up.
        time_limit: seconds for a prediction that was not made before.
        ranks: predict one of so many ranks that share the batch, as `run_on_ranks` has them; None is a process alone.
        shard: how the ranks divide the model, a name of `ranks/shards.toml`.

    Raises:
        ConfigurationError: the ranks cannot share the batch or the model; the GPU or the engine is unknown; a model, a
            length or a precision cannot be used; or an operation cannot be traced, with its name and its module.
        UnavailableError: the config of a hub model cannot be had, the emulator was asked for and is not set up, or the
            time was up. The process was ended then, and the next prediction starts another.
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
    time_limit: float = TIME_LIMIT_S,
    ranks: int | None = None,
    shard: str = "none",
) -> list[PredictionOrError]:
    """Predict a recipe for several GPUs, as `predict` does for one, and return the answers in the order of the GPUs.

    A GPU that cannot run the recipe has the error in the place of its prediction. The time limit is for each GPU.

    Raises ConfigurationError and UnavailableError for what no GPU could run: as `predict`.
    """
    names = list(map(device_name, gpus))
    recipe = resolve_model(recipe, names)
    sharing = None
    if ranks is not None or shard != "none":
        sharing = ranks_for(recipe, ranks, shard)
    request = (padding, sharing)
    engines = {name: engine_for(name, engine) for name in names}
    answers: dict[str, PredictionOrError] = {}
    unanswered_keys: dict[str, str] = {}
    for name in names:
        reason = ""
        if name != CPU:
            reason = why_not_with_techniques(recipe, name, engines[name])
        key = _key(recipe, name, *request, engines[name])
        earlier = prediction_cache.get(key)
        if reason:
            answers[name] = ConfigurationError(f"predict: {reason}")
        elif earlier:
            answers[name] = earlier
        else:
            unanswered_keys[name] = key
    shadowed = [name for name in unanswered_keys if engines[name] == SHADOW]
    if shadowed:  # one traced step serves all cards that choose the same kernels
        shadows = ask_shadow(recipe, shadowed, *request, time_limit=time_limit * len(shadowed))
        answers |= zip(shadowed, shadows, strict=True)
    for name, key in unanswered_keys.items():
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
    """Choose `"emulator"` or `"shadow"`: the engine asked for, the environment's, or the emulator where it is set up.

    Raises:
        ConfigurationError: there is no such engine, or the emulator was asked for the CPU.
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
    """Return why a recipe cannot be predicted or run on a device: for want of positions, of bf16 in hardware, or of an
    engine. Empty text means that nothing is known against it.

    Nothing is predicted for this, and no hub is asked. What this machine alone lacks, as a package, is no reason.

    Raises ConfigurationError: the device is unknown.
    """
    gpu = device_name(gpu)
    positions = known_positions(recipe.model)
    taken = {technique.name: technique.positions for technique in recipe.techniques if technique.positions}
    try:
        if positions:
            check_positions(recipe.model, positions, recipe.sequence_length, taken)
    except ConfigurationError as error:
        return str(error)
    return why_not_with_techniques(recipe, gpu, engine_for(gpu))


def why_not_with_techniques(recipe: Recipe, gpu: str, engine: str) -> str:
    """Return why one of the recipe's techniques cannot be used on a device, or empty text."""
    device = Device(CPU, CPU)
    if gpu in GPUS:
        device = GPUS[gpu].device
    for technique in recipe.techniques:
        reason = technique.missing(device)
        # A technique may lack something of the card, or of this machine, as a package. The newest card lacks nothing,
        # so that the sentence which it gets as well is about this machine.
        if reason and reason != technique.missing(GPUS[NEWEST].device):
            return reason
        if technique.why_not_traced and (reason or engine == SHADOW):
            return technique.why_not_traced
    return ""


def warm_predictions(gpu: str = "h100") -> None:
    """Start the process that will predict for this GPU. It loads its libraries while the caller goes on."""
    if engine_for(gpu) == EMULATOR:
        start_trunk(GPUS[device_name(gpu)], CARD_MODULES)
    else:
        start_shadow()


def predict_peak(recipe_settings: Mapping[str, Any], device: Device) -> int | None:
    """Predict the most allocated bytes of a record's recipe on the device that it was measured on.

    None means that this cannot be predicted.
    """
    name = CPU
    if device.kind != CPU:
        card = recognize_gpu(device.name, device.total_bytes)
        if card is None or device.kind != "cuda":
            return None
        name = card.name
    with suppress(WorkbenchError):
        return predict(Recipe.from_dict(recipe_settings), name).peak_allocated_bytes
    return None


def resolve_model(recipe: Recipe, gpus: list[str]) -> Recipe:
    """Return the recipe with the model that `auto` stands for on these devices, as a run on them has it."""
    if recipe.model != "auto":
        return recipe
    return replace(recipe, model=EMBEDDED if gpus == [CPU] else "gpt2")


def _key(recipe: Recipe, gpu: str, padding: bool, ranks: Ranks | None, engine: str) -> str:
    """Return the key of a cached prediction: it changes with recipe, GPU, ranks and engine, with the versions of the
    libraries, with the workbench's own code, and with the model's config."""
    facts = [recipe.to_dict(), gpu, padding, str(ranks), engine, versions(), _digest_code()]
    return prediction_cache.digest(*facts, *prediction_cache.read_changeable(recipe))[:24]


@cache
def _digest_code() -> str:
    """Return the SHA-256 of the workbench's files that can change a prediction."""
    digest = hashlib.sha256()
    paths: list[Path] = []
    for ending in ("py", "json", "toml", "[ch]"):  # the emulator's stubs are C
        paths += PACKAGE.rglob(f"*.{ending}")
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()
