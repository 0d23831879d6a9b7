"""Which engine predicts: PyTorch's own allocator on an emulated GPU, or the shadow."""

import os

from workbench.errors import ConfigurationError
from workbench.gpus.emulator import place
from workbench.measure.device import CPU

EMULATOR = "emulator"
SHADOW = "shadow"
ENGINES = (EMULATOR, SHADOW)


def engine_words(source: str) -> str:
    """Who made a prediction with this `source`, for tables and captions."""
    return "PyTorch's allocator on an emulated GPU" if source.startswith("emulated") else "the shadow of its step"


def engine_for(gpu: str, engine: str | None = None) -> str:
    """`"emulator"` or `"shadow"`: as asked, as the environment says, or the emulator where it is set up.

    Raises:
        ConfigurationError: no such engine, or the emulator for the CPU.
        UnavailableError: the emulator was asked for and is not set up.
    """
    if engine == EMULATOR and gpu == CPU:
        raise ConfigurationError("predict: the emulator plays GPUs. Leave out the engine, or name a GPU.")
    chosen = engine or (SHADOW if gpu == CPU else os.environ.get("WORKBENCH_ENGINE"))
    if chosen not in (None, "", *ENGINES):
        raise ConfigurationError(f"predict: engine {chosen!r} is not one of {', '.join(ENGINES)}.")
    if chosen == EMULATOR:
        place.stub_folder()
    return chosen or (EMULATOR if place.is_set_up() else SHADOW)
