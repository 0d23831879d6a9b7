"""Hold predictions against measurements on this machine's device, or on an emulated GPU.

    python tools/verify.py                          # data/reference/grid.json, on the fastest device here
    python tools/verify.py --device emulated:t4     # data/reference/emulated/grid.json, by the shadow

The configurations were chosen before anything was measured. Each is measured in a new process, so that no run sees the
memory of another; on an emulated GPU in that card's process. What was measured is kept in the output, and predicted
again: the program goes on where it was stopped, and tries again what failed. It ends with 1 if anything was not
measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError, OutOfMemoryError, WorkbenchError
from workbench.base.launch import launch
from workbench.base.paths import DATA, versions, write_whole
from workbench.gpus.catalogue import recognize_gpu
from workbench.gpus.emulator.card import DEVICE, find_emulated_gpu
from workbench.journal.record import Record
from workbench.prediction.predict import CPU, SHADOW, predict
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.training.run import run
from workbench.training.world import refuse_several_ranks

REFERENCE = DATA / "reference"
GRID = REFERENCE / "grid.json"
EMULATED_GRID = REFERENCE / "emulated" / "grid.json"
VERIFIED_STEPS = 6  # three to warm up, which carry the tracker, and three to time
EMULATED_STEPS = 3  # an emulated GPU has nothing to time
NO_ROOM = "does not fit"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu, cuda, mps or emulated:GPU (default: the fastest there is)")
    parser.add_argument("--gpu", help="what to predict for (default: the GPU that is here)")
    parser.add_argument("--engine", help="emulator or shadow: what predicts (default: as `workbench predict`)")
    parser.add_argument("--grid", type=Path, metavar="FILE", help="other configurations, in the form of grid.json")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: verification.json in data/reference")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the output already")
    args = parser.parse_args(arguments)
    gpu = args.gpu or gpu_of_device(args.device)
    output = args.output or default_output(gpu, args.device)
    checks = verify(
        recipes(args.grid or default_grid(args.device)),
        gpu=gpu,
        device=args.device,
        output=output,
        fresh=args.fresh,
        engine=args.engine,
    )
    print(f"{as_text(checks)}\n{output}")
    return 0 if summary(checks)["measured"] == len(checks) else 1


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
        return relative_error(self.predicted_allocated_bytes, self.measured_allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        return relative_error(self.predicted_reserved_bytes, self.measured_reserved_bytes)


def relative_error(predicted: int | None, measured: int | None) -> float | None:
    if predicted is None or not measured:
        return None
    return (predicted - measured) / measured


# ---- what is verified ----


def default_grid(device: str | None) -> Path:
    return EMULATED_GRID if find_emulated_gpu(device or "") else GRID


def recipes(path: Path = GRID) -> list[Recipe]:
    """Read the configurations of a grid file."""
    configurations = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        recipe = Recipe(
            model=entry["model"],
            effective_batch_size=entry["batch"],
            sequence_length=entry["length"],
            steps=VERIFIED_STEPS,
            techniques=tuple(map(parse_technique, entry["techniques"])),
        )
        configurations.append(recipe)
    return configurations


def gpu_of_device(device: str | None) -> str:
    """Return the name in `GPUS` of a device that `run` takes. Raises as `gpu_of` and `Device.find` do."""
    card = find_emulated_gpu(device or "")
    return card.name if card else gpu_of(Device.find(device))


def gpu_of(device: Device) -> str:
    """Return the name in `GPUS` of a device; `cpu` for the CPU.

    Raises:
        ConfigurationError: a GPU that is not in the table.
    """
    if device.kind == "cpu":
        return CPU
    gpu = recognize_gpu(device.name)
    if gpu is None:
        raise ConfigurationError(f"verify: {device} is not in the table of GPUs. Name one that is like it: --gpu NAME.")
    return gpu.name


def default_output(gpu: str, device: str | None = None) -> Path:
    """Return the file for these checks among the reference measurements."""
    is_emulated = (device or "").startswith(DEVICE)
    folder = REFERENCE / "emulated" if is_emulated else REFERENCE
    return folder / gpu / "verification.json"


# ---- predicted and measured ----


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
    if engine is None and find_emulated_gpu(device or ""):
        engine = SHADOW
    measured_before: dict[str, Check] = {}
    if output.exists() and not fresh:
        measured_before = read(output)
    checks = {recipe.id: measured_before.get(recipe.id) for recipe in chosen}
    for recipe in tqdm(chosen, desc="verify", unit="run"):
        check = checks[recipe.id] or measure(recipe, device)
        checks[recipe.id] = with_prediction(check, recipe, gpu, engine)
        write(output, list(filter(None, checks.values())), gpu)  # checks of later recipes too
    return list(filter(None, checks.values()))


def with_prediction(check: Check, recipe: Recipe, gpu: str, engine: str | None) -> Check:
    """Return the check with what is predicted today."""
    try:
        prediction = predict(recipe, gpu, engine=engine)
    except WorkbenchError as error:
        return replace(check, remark=check.remark or str(error))
    return replace(
        check,
        micro_batch_size=prediction.micro_batch_size,
        predicted_allocated_bytes=prediction.peak_allocated_bytes,
        predicted_reserved_bytes=prediction.peak_reserved_bytes,
        predicted_fits=prediction.fits,
    )


def measure(recipe: Recipe, device: str | None) -> Check:
    """Measure a recipe, and return a check without a prediction; `remark` says why it failed, if it did."""
    micro_batch_size = recipe.training_arguments()["per_device_train_batch_size"]
    check = Check(recipe.label, recipe.model, micro_batch_size, recipe.sequence_length, recipe.id)
    try:
        record = run_alone(recipe, device)
    except OutOfMemoryError:
        return replace(check, remark=NO_ROOM)
    except WorkbenchError as error:
        return replace(check, remark=str(error))
    except RuntimeError as error:  # the other process failed
        return replace(check, remark=str(error).splitlines()[-1])
    return replace(
        check,
        measured_allocated_bytes=record.peak_allocated_bytes,
        measured_reserved_bytes=record.peak_reserved_bytes,
        tokens_per_s=record.tokens_per_s,
    )


def run_alone(recipe: Recipe, device: str | None) -> Record:
    """Run a recipe in a process of its own.

    Evaluation counts, and of examples of unequal length the longest come first, as in a prediction.
    """
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"device": device, "folder": Path(folder), "longest_first": True}
        if find_emulated_gpu(device or ""):  # a card is another process anyway
            return run(replace(recipe, steps=EMULATED_STEPS), **options)
        record: Record = launch(run, recipe, name="run", **options)
        return record


# ---- the file ----


def read(output: Path) -> dict[str, Check]:
    """Read the checks that were measured under these versions of the libraries, by the id of the recipe.

    Their predictions are left out.
    """
    written = json.loads(output.read_text(encoding="utf-8"))
    if written["versions"] != versions():
        return {}
    names = {field.name for field in fields(Check) if not field.name.startswith("predicted")}
    checks = {}
    for row in written["checks"]:
        facts = {name: row[name] for name in names & row.keys()}
        check = Check(**facts)
        if check.measured_allocated_bytes is not None:
            checks[check.recipe_id] = check
    return checks


def write(output: Path, checks: list[Check], gpu: str) -> None:
    """Write facts of the whole, then a line for each check."""
    facts = json.dumps({"gpu": gpu, "versions": versions(), "summary": summary(checks)}, indent=1)
    head = facts.removesuffix("\n}")
    lines = []
    for check in checks:
        row = asdict(check) | {"error": check.error, "reserved_error": check.reserved_error}
        lines.append(f"  {json.dumps(row, ensure_ascii=False)}")
    rows = ",\n".join(lines)
    write_whole(output, f'{head},\n "checks": [\n{rows}\n ]\n}}\n')


# ---- all together ----


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the mean and the worst of the absolute errors, and the largest underestimate, over what was measured."""
    allocated = [check.error for check in checks if check.error is not None]
    reserved = [check.reserved_error for check in checks if check.reserved_error is not None]
    figures: dict[str, Any] = {"configurations": len(checks), "measured": len(allocated)}
    for name, errors in (("allocated", allocated), ("reserved", reserved)):
        if errors:
            figures[f"{name}_mean"] = fmean(map(abs, errors))
            figures[f"{name}_worst"] = max(map(abs, errors))
            figures[f"{name}_most_under"] = max(0.0, -min(errors))
    return figures


def as_text(checks: Sequence[Check]) -> str:
    """Return a line for each configuration, then the summary."""
    lines = [f"{'allocated':>8} {'reserved':>8}  batch, length, model, techniques (predicted against measured)"]
    for check in checks:
        errors = f"{percent(check.error):>8} {percent(check.reserved_error):>8}"
        shape = f"{check.micro_batch_size:>3} × {check.sequence_length:<5}"
        line = f"{errors}  {shape} {check.model:20} {check.label} {remark(check)}"
        lines.append(line.rstrip())
    shares = []
    for name, figure in summary(checks).items():
        if isinstance(figure, float):
            shares.append(f"{name.replace('_', ' ')} {figure:.2%}")
    return "\n".join([*lines, "", ", ".join(shares) or "nothing was measured"])


def remark(check: Check) -> str:
    if check.remark == NO_ROOM and check.predicted_fits:
        return "(DOES NOT FIT, WAS SAID TO FIT)"
    if check.remark == NO_ROOM:
        return f"({NO_ROOM}, as predicted)"
    if check.measured_allocated_bytes is not None and not check.predicted_fits:
        return "(FITS, WAS SAID NOT TO)"
    return f"({check.remark})" if check.remark else ""


def percent(error: float | None) -> str:
    return "–" if error is None else f"{error:+.2%}"


if __name__ == "__main__":
    sys.exit(main())
