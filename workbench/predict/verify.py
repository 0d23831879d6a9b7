"""Predictions compared with measurements on this machine's device.

The configurations stand in `data/reference/grid.json`, chosen before anything was measured. Each is measured in a new
process, so that no run sees the memory of another. What was measured is kept: the command goes on where it was stopped,
and tries again what failed.
"""

import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from workbench.errors import ConfigurationError, WorkbenchError
from workbench.gpus.catalogue import of_device
from workbench.gpus.emulator.card import DEVICE, emulated_card
from workbench.paths import DATA, INSTALLED, runs_folder
from workbench.predict.predict import CPU, SHADOW, predict
from workbench.recipe import Recipe
from workbench.records.record import Record, versions
from workbench.run.world import World, refuse_several_ranks
from workbench.techniques import parse_technique

GRID = DATA / "reference" / "grid.json"
VERIFIED_STEPS = 6  # three to warm up, which carry the tracker, and three to time


@dataclass(frozen=True)
class Check:
    """One configuration. `error` is (predicted - measured) / measured; None where there is no measurement."""

    label: str
    model: str
    micro_batch_size: int
    sequence_length: int
    recipe_id: str
    predicted_allocated_bytes: int
    predicted_reserved_bytes: int | None
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


def recipes(path: Path = GRID) -> list[Recipe]:
    """The configurations of a grid file."""
    return [
        Recipe(
            model=entry["model"],
            effective_batch_size=entry["batch"],
            sequence_length=entry["length"],
            steps=VERIFIED_STEPS,
            techniques=tuple(parse_technique(text) for text in entry["techniques"]),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]


def gpu_of_device(device: str | None) -> str:
    """The name in `GPUS` of a device that `run` takes. Raises as `gpu_of` and `World.find` do."""
    card = emulated_card(device or "")
    return card.name if card else gpu_of(World.find(device))


def gpu_of(world: World) -> str:
    """The name in `GPUS` of a world's device; `cpu` for the CPU.

    Raises:
        ConfigurationError: a GPU that is not in the table.
    """
    if world.device_kind == "cpu":
        return CPU
    found = of_device(world.device_name)
    if found is None:
        raise ConfigurationError(f"verify: {world} is not in the table of GPUs. Name one that is like it: --gpu NAME.")
    return found.name


def default_output(gpu: str, device: str | None = None) -> Path:
    """Among the reference measurements of a checkout; beside the user's runs where the package is installed."""
    reference = runs_folder() / "reference" if INSTALLED else DATA / "reference"
    return reference / ("emulated" if (device or "").startswith(DEVICE) else "") / gpu / "verification.json"


def verify(
    chosen: Iterable[Recipe],
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
    chosen = list(chosen)
    known = {} if fresh or not output.exists() else _read(output)
    checks = {recipe.id: known.get(recipe.id) for recipe in chosen}
    for recipe in tqdm(chosen, desc="verify", unit="run"):
        checks[recipe.id] = checks[recipe.id] or _check(recipe, gpu, device, engine)
        _write(output, [check for check in checks.values() if check], gpu)
    return [check for check in checks.values() if check]


def _check(recipe: Recipe, gpu: str, device: str | None, engine: str | None) -> Check:
    predicted = predict(recipe, gpu, engine=engine)
    check = Check(
        label=recipe.label,
        model=recipe.model,
        micro_batch_size=predicted.micro_batch_size,
        sequence_length=recipe.sequence_length,
        recipe_id=recipe.id,
        predicted_allocated_bytes=predicted.peak_allocated_bytes,
        predicted_reserved_bytes=predicted.peak_reserved_bytes,
    )
    measured = _measured(recipe, device)
    if isinstance(measured, str):
        return replace(check, remark=measured)
    return replace(
        check,
        measured_allocated_bytes=measured.peak_allocated_bytes,
        measured_reserved_bytes=measured.peak_reserved_bytes,
        tokens_per_s=measured.tokens_per_s,
    )


def _measured(recipe: Recipe, device: str | None) -> Record | str:
    """The record, or why there is none.

    The child is spawned: a forked one cannot use CUDA once an import of its parent (bitsandbytes) has started it.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        if emulated_card(device or ""):  # which is another process anyway
            _run(recipe, device, folder)
            return _answer(folder, 0)
        process = context.Process(target=_run, args=(recipe, device, folder))
        process.start()
        process.join()
        return _answer(folder, process.exitcode)


def _answer(folder: str, exit_code: int | None) -> Record | str:
    answer = Path(folder, "answer.json")
    if not answer.exists():
        return f"the process ended with exit code {exit_code}"
    found = json.loads(answer.read_text(encoding="utf-8"))
    return str(found["remark"]) if "remark" in found else Record(**found)


def _run(recipe: Recipe, device: str | None, folder: str) -> None:
    """In the child. No evaluation is larger than a training step, so the peak is that of training."""
    from workbench.run.run import run

    try:
        answer = asdict(run(recipe, device=device, folder=Path(folder)))
    except WorkbenchError as error:
        answer = {"remark": str(error)}
    except Exception:
        answer = {"remark": traceback.format_exc().splitlines()[-1]}
    Path(folder, "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def _read(output: Path) -> dict[str, Check]:
    """What was measured under these versions of the libraries, by the id of the recipe."""
    found = json.loads(output.read_text(encoding="utf-8"))
    if found["versions"] != versions():
        return {}
    checks = [Check(**{k: v for k, v in check.items() if "error" not in k}) for check in found["checks"]]
    return {check.recipe_id: check for check in checks if check.measured_allocated_bytes is not None}


def _write(output: Path, done: list[Check], gpu: str) -> None:
    checks = [{**asdict(c), "error": c.error, "reserved_error": c.reserved_error} for c in done]
    text = json.dumps({"gpu": gpu, "versions": versions(), "summary": summary(done), "checks": checks}, indent=1)
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_suffix(".part")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, output)


def summary(done: Iterable[Check]) -> dict[str, Any]:
    """Mean and worst of the absolute errors, and the largest underestimate, over what was measured."""
    done = list(done)
    allocated = [check.error for check in done if check.error is not None]
    reserved = [check.reserved_error for check in done if check.reserved_error is not None]
    return {
        "configurations": len(done),
        "measured": len(allocated),
        **_figures("allocated", allocated),
        **_figures("reserved", reserved),
    }


def _figures(name: str, errors: list[float]) -> dict[str, float]:
    if not errors:
        return {}
    sizes = [abs(error) for error in errors]
    return {
        f"{name}_mean": sum(sizes) / len(sizes),
        f"{name}_worst": max(sizes),
        f"{name}_most_under": max(0.0, -min(errors)),
    }


def verification_text(done: Iterable[Check]) -> str:
    """One line a configuration, then the summary."""
    done = list(done)
    lines = [
        f"{_percent(check.error):>8} {_percent(check.reserved_error):>8}  {check.micro_batch_size:>3} × "
        f"{check.sequence_length:<5} {check.model:20} {check.label} {check.remark}".rstrip()
        for check in done
    ]
    figures = [f"{k.replace('_', ' ')} {v:.2%}" for k, v in summary(done).items() if isinstance(v, float)]
    head = f"{'allocated':>8} {'reserved':>8}  batch, length, model, techniques (predicted against measured)"
    return "\n".join([head, *lines, "", ", ".join(figures) or "nothing was measured"])


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.2%}"
