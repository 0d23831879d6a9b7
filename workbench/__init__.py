"""Learn, measure and choose memory-saving techniques for fine-tuning GPT-2.

    from workbench import Recipe, run
    from workbench.techniques import Lora

    record = run(Recipe(model="gpt2-tiny") | Lora(rank=8))

Importing the package is light: torch and transformers come with the first name that needs them.
"""

import gc
import logging
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# bitsandbytes, which PEFT imports, remarks on a faster kernel that only another package has
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_HOMES = {
    "Recipe": "recipe",
    "Record": "record", "records": "record",
    "run": "training",
    "script": "export",
    "Meter": "memory.meter",
    "Category": "memory.categories", "Phase": "memory.categories", "format_bytes": "memory.categories",
    "compare": "comparison",
    "holders": "memory.leaks", "release": "memory.leaks",
    "predict": "prediction", "Prediction": "prediction",
    "plan": "planner",
    "Playground": "widgets.playground",
    "diagnose": "doctor",
}  # fmt: skip

__all__ = list(_HOMES)


_MODULES = ("compatibility", "corpus", "devices", "forecasts", "models", "plots")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _imported(name)
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    value = getattr(_imported(_HOMES[name]), name)
    globals()[name] = value  # a submodule of the same name must not win later
    return value


def _imported(module: str) -> Any:
    """Without garbage collections: the libraries are half a million objects, and none of them is thrown away."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(f"workbench.{module}")
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
