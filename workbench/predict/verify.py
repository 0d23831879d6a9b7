"""Predictions compared with measurements on this machine's device, or on an emulated GPU.

The configurations stand in `data/reference/grid.json`, and those for an emulated GPU in `emulated/grid.json`; they were
chosen before anything was measured. Each is measured in a new process, so that no run sees the memory of another; on an
emulated GPU in that card's process. What was measured is kept, and predicted again: the command goes on where it was
stopped, and tries again what failed.
"""

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from tqdm import tqdm

from workbench.errors import ConfigurationError, OutOfMemoryError, WorkbenchError
from workbench.gpus.catalogue import of_device
from workbench.gpus.emulator.card import DEVICE, emulated_card
from workbench.gpus.process import Worker
from workbench.measure.device import Device
from workbench.paths import DATA, INSTALLED, runs_folder, versions, write_whole
from workbench.predict.predict import CPU, SHADOW, predict
from workbench.recipe import Recipe
from workbench.records.record import Record
from workbench.run.world import refuse_several_ranks
from workbench.techniques import parse_technique

REFERENCE = DATA / "reference"
GRID, EMULATED_GRID = REFERENCE / "grid.json", REFERENCE / "emulated" / "grid.json"
VERIFIED_STEPS = 6  # three to warm up, which carry the tracker, and three to time
EMULATED_STEPS = 3  # where there is nothing to time
NO_ROOM = "does not fit"


@dataclass(frozen=True)
class Check:
    """One configuration. `error` is (predicted - measured) / measured; None where there is no measurement.

    What was not measured, or not predicted, has the reason in `remark`.
    """

    label: str
    model: str
    micro_batch_size: int
    sequence_length: int
    recipe_id: str
    predicted_allocated_bytes: int | None = None
    predicted_reserved_bytes: int | None = None
    predicted_fits: bool = True
    measured_allocated_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    tokens_per_s: float | None = None
    remark: str = ""

    @property
    def error(self) -> float | None:
        return _error(self.predicted_allocated_bytes, self.measured_allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        return _error(self.predicted_reserved_bytes, self.measured_reserved_bytes)


def _error(predicted: int | None, measured: int | None) -> float | None:
    return None if not measured or predicted is None else (predicted - measured) / measured


def default_grid(device: str | None) -> Path:
    return EMULATED_GRID if emulated_card(device or "") else GRID


def recipes(path: Path = GRID) -> list[Recipe]:
    """The configurations of a grid file."""
    names = {"model": "model", "batch": "effective_batch_size", "length": "sequence_length"}
    found = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        given = {field: entry[name] for name, field in names.items()}
        found.append(Recipe(**given, steps=VERIFIED_STEPS, techniques=tuple(map(parse_technique, entry["techniques"]))))
    return found


def gpu_of_device(device: str | None) -> str:
    """The name in `GPUS` of a device that `run` takes. Raises as `gpu_of` and `Device.find` do."""
    card = emulated_card(device or "")
    return card.name if card else gpu_of(Device.find(device))


def gpu_of(device: Device) -> str:
    """The name in `GPUS` of a device; `cpu` for the CPU.

    Raises:
        ConfigurationError: a GPU that is not in the table.
    """
    if device.kind == "cpu":
        return CPU
    found = of_device(device.name)
    if found is None:
        raise ConfigurationError(f"verify: {device} is not in the table of GPUs. Name one that is like it: --gpu NAME.")
    return found.name


def default_output(gpu: str, device: str | None = None) -> Path:
    """Among the reference measurements of a checkout; beside the user's runs where the package is installed."""
    reference = runs_folder() / "reference" if INSTALLED else REFERENCE
    return reference / ("emulated" if (device or "").startswith(DEVICE) else "") / gpu / "verification.json"


def verify(
    chosen: Sequence[Recipe],
    *,
    gpu: str,
    device: str | None = None,
    output: Path,
    fresh: bool = False,
    engine: str | None = None,
) -> list[Check]:
    """Predict and measure each recipe; `output` (JSON) grows with each, and what was measured there is not done again.

    A configuration that failed has a row with the reason in `remark`, and is tried again by the next call.

    Args:
        gpu: what to predict for, a name of `GPUS` or `cpu`.
        device: what to measure on, as for `run`.
        fresh: forget what stands in `output`.
        engine: of the predictions; on an emulated GPU the shadow, since the emulator would be compared with itself.

    Raises:
        ConfigurationError: torchrun started this process.
    """
    refuse_several_ranks()
    engine = engine or (SHADOW if emulated_card(device or "") else None)
    known = {} if fresh or not output.exists() else _read(output)
    checks = {recipe.id: known.get(recipe.id) for recipe in chosen}
    for recipe in tqdm(chosen, desc="verify", unit="run"):
        checks[recipe.id] = _predicted(recipe, gpu, engine, checks[recipe.id] or _measured(recipe, device))
        _write(output, [check for check in checks.values() if check], gpu)
    return [check for check in checks.values() if check]


def _predicted(recipe: Recipe, gpu: str, engine: str | None, check: Check) -> Check:
    """The check with what is predicted today."""
    try:
        found = predict(recipe, gpu, engine=engine)
    except WorkbenchError as error:
        return replace(check, remark=check.remark or str(error))
    return replace(
        check,
        micro_batch_size=found.micro_batch_size,
        predicted_allocated_bytes=found.peak_allocated_bytes,
        predicted_reserved_bytes=found.peak_reserved_bytes,
        predicted_fits=found.fits,
    )


def _measured(recipe: Recipe, device: str | None) -> Check:
    """A check without a prediction; if it failed, with the reason."""
    micro_batch_size = recipe.training_arguments()["per_device_train_batch_size"]
    check = Check(recipe.label, recipe.model, micro_batch_size, recipe.sequence_length, recipe.id)
    try:
        record = _run_alone(recipe, device)
    except OutOfMemoryError:
        return replace(check, remark=NO_ROOM)
    except WorkbenchError as error:
        return replace(check, remark=str(error))
    except RuntimeError as error:  # of the other process
        return replace(check, remark=str(error).splitlines()[-1])
    return replace(
        check,
        measured_allocated_bytes=record.peak_allocated_bytes,
        measured_reserved_bytes=record.peak_reserved_bytes,
        tokens_per_s=record.tokens_per_s,
    )


def _run_alone(recipe: Recipe, device: str | None) -> Record:
    """As in a prediction, evaluation counts, and of examples of unequal length the longest come first."""
    from workbench.run.run import run

    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"device": device, "folder": Path(folder), "longest_first": True}
        if emulated_card(device or ""):  # which is another process anyway
            return run(replace(recipe, steps=EMULATED_STEPS), **options)
        with closing(Worker(os.environ, (), name="run")) as worker:
            return cast("Record", worker.call(run, recipe, **options))


def _read(output: Path) -> dict[str, Check]:
    """What was measured under these versions of the libraries, without predictions, by the id of the recipe."""
    found = json.loads(output.read_text(encoding="utf-8"))
    if found["versions"] != versions():
        return {}
    kept = {field.name for field in fields(Check) if not field.name.startswith("predicted")}
    checks = [Check(**{name: check[name] for name in kept & check.keys()}) for check in found["checks"]]
    return {check.recipe_id: check for check in checks if check.measured_allocated_bytes is not None}


def _write(output: Path, done: list[Check], gpu: str) -> None:
    """A line for each check."""
    rows = [{**asdict(c), "error": c.error, "reserved_error": c.reserved_error} for c in done]
    facts = json.dumps({"gpu": gpu, "versions": versions(), "summary": summary(done)}, indent=1)
    checks = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in rows)
    write_whole(output, f'{facts[:-2]},\n "checks": [\n{checks}\n ]\n}}\n')


def summary(done: Sequence[Check]) -> dict[str, Any]:
    """Mean and worst of the absolute errors, and the largest underestimate, over what was measured."""
    found: dict[str, Any] = {"configurations": len(done), "measured": sum(check.error is not None for check in done)}
    for name, attribute in (("allocated", "error"), ("reserved", "reserved_error")):
        errors = [error for check in done if (error := getattr(check, attribute)) is not None]
        if errors:
            found[f"{name}_mean"] = fmean(map(abs, errors))
            found[f"{name}_worst"] = max(map(abs, errors))
            found[f"{name}_most_under"] = max(0.0, -min(errors))
    return found


def verification_text(done: Sequence[Check]) -> str:
    """One line a configuration, then the summary."""
    lines = [
        f"{_percent(check.error):>8} {_percent(check.reserved_error):>8}  {check.micro_batch_size:>3} × "
        f"{check.sequence_length:<5} {check.model:20} {check.label} {_remark(check)}".rstrip()
        for check in done
    ]
    figures = [f"{k.replace('_', ' ')} {v:.2%}" for k, v in summary(done).items() if isinstance(v, float)]
    head = f"{'allocated':>8} {'reserved':>8}  batch, length, model, techniques (predicted against measured)"
    return "\n".join([head, *lines, "", ", ".join(figures) or "nothing was measured"])


def _remark(check: Check) -> str:
    if check.remark == NO_ROOM:
        return f"({NO_ROOM}, as predicted)" if not check.predicted_fits else "(DOES NOT FIT, WAS SAID TO FIT)"
    if check.measured_allocated_bytes is not None and not check.predicted_fits:
        return "(FITS, WAS SAID NOT TO)"
    return f"({check.remark})" if check.remark else ""


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.2%}"
