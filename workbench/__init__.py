"""Learn, measure and choose memory-saving techniques for fine-tuning GPT-2.

    from workbench import Recipe, run
    from workbench.techniques import Lora

    record = run(Recipe(model="gpt2-tiny") | Lora(rank=8))

Importing the package is light: torch and transformers come with the first name that needs them.
"""

import logging
from importlib import import_module
from typing import Any

from workbench.measure.garbage import pause_collector

__version__ = "0.1.0"

# bitsandbytes, which PEFT imports, remarks on a faster kernel that only another package has
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

_HOMES = {
    "Recipe": "recipe",
    "Record": "records.record", "records": "records.frame",
    "run": "run.run",
    "describe_device": "run.world", "pick_device": "run.world",
    "script": "export.script",
    "Meter": "measure.meter",
    "Category": "measure.categories", "Phase": "measure.categories", "format_bytes": "measure.categories",
    "compare": "records.compare",
    "holders": "measure.leaks", "release": "measure.leaks",
    "predict": "predict.predict", "Prediction": "predict.prediction",
    "predictions_beside": "predict.beside", "style_predictions": "predict.beside",
    "plan": "advise.plan",
    "diagnose": "advise.doctor",
    "Playground": "widgets.playground",
}  # fmt: skip
_MODULES = {"plots": "records.plots"}

__all__ = list(_HOMES)

# These rooms are named like a function of theirs. Loaded once, they are not put in the function's place again.
for _room in ("predict", "records", "run"):
    import_module(f"workbench.{_room}")
    globals().pop(_room, None)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _imported(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    globals()[name] = getattr(_imported(_HOMES[name]), name)
    return globals()[name]


def _imported(module: str) -> Any:
    with pause_collector():
        return import_module(f"workbench.{module}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
