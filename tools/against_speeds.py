"""Estimated times held against measured speeds.

    tools/against_speeds.py h100         # the speeds of h100/gpt2-124m/comparison.csv, each recipe predicted anew
    tools/against_speeds.py cpu          # every recipe of cpu/*/comparison.csv run and predicted here (15 minutes)
    tools/against_speeds.py rates        # what this machine's CPU does in a second, for "cpu" in gpus/rates.json

`time.csv` beside a comparison keeps what a step asks of the device, the estimated speed and the measured one, relative
to the baseline's; of a CPU with the slowest and the fastest of three runs.
"""

import csv
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from workbench.advise.candidate import Candidate
from workbench.base.paths import DATA
from workbench.prediction.predict import CPU, SHADOW, predict
from workbench.recipe import Recipe
from workbench.techniques import parse_technique
from workbench.training.run import run

REFERENCE = DATA / "reference"
KINDS = ("fp32_flops", "half_flops", "memory_bytes", "bus_bytes")
ITS_OWN_TOKENS = "padding"  # pads its examples: tokens a second are those of other batches
ON_AN_H100 = Recipe(model="random:gpt2", sequence_length=1024, steps=13, dropout=0.1)
ON_A_CPU = {
    "gpt2-tiny": Recipe(steps=12),
    "gpt2-124m": Recipe(model="random:gpt2", effective_batch_size=4, steps=4),
}
ROUNDS = 3
TRIES = 10


# ---- the three commands ----


def h100() -> None:
    folder = REFERENCE / "h100" / "gpt2-124m"
    speeds = {label: [float(ratio)] for label, ratio in comparison(folder).items()}
    write(folder, ON_AN_H100, "h100", speeds)


def cpu() -> None:
    """Run all recipes round by round, so that whatever else the machine does meanwhile meets each alike."""
    for name, recipe in ON_A_CPU.items():
        folder = REFERENCE / "cpu" / name
        seconds = defaultdict(list)
        for _ in range(ROUNDS):
            for label in comparison(folder):
                seconds[label].append(seconds_of_steps(apply_label(recipe, label)))
                print(f"{seconds[label][-1]:8.2f} s  {label}", flush=True)
        baseline = statistics.median(seconds["baseline"])
        speeds = {}
        for label, of_rounds in seconds.items():
            speeds[label] = [baseline / of_round for of_round in of_rounds]
        write(folder, recipe, CPU, speeds)


def rates() -> None:
    """Print the best of several tries.

    They are products as wide as those of GPT-2 124M, and 64 MiB added to and written to the disk.
    """
    narrow = torch.randn(1024, 768)
    wide = torch.randn(768, 3072)
    narrow_16 = narrow.bfloat16()
    wide_16 = wide.bfloat16()
    product_flops = 2 * 1024 * 768 * 3072
    many = torch.randn(2**24)
    with tempfile.NamedTemporaryFile() as file:
        tries = {
            "fp32_flops": (lambda: narrow @ wide, product_flops),
            "half_flops": (lambda: narrow_16 @ wide_16, product_flops),
            "memory_bytes": (lambda: many + 1, 2 * many.nbytes),
            "bus_bytes": (lambda: torch.save(many, file.name), many.nbytes),
        }
        for rate, (work, amount) in tries.items():
            fastest = min(seconds_of(work) for _ in range(TRIES))
            print(f"{rate:12} {amount / fastest:.2e}")


# ---- measured ----


def comparison(folder: Path) -> dict[str, str]:
    """Return the measured speed of each label, as text, empty where none was measured.

    Labels whose speed cannot be compared are left out.
    """
    speeds = {}
    with (folder / "comparison.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["label"].startswith(ITS_OWN_TOKENS):
                speeds[row["label"]] = row["speed_ratio"]
    return speeds


def apply_label(recipe: Recipe, label: str) -> Recipe:
    """Add the techniques of a label of `comparison.csv`, such as `lora(rank=4) + pure_bf16`."""
    if label == "baseline":
        return recipe
    for technique in label.split(" + "):
        name, _, settings = technique.rstrip(")").partition("(")
        as_typed = settings.replace("=", ":").replace(", ", ",")
        recipe |= parse_technique(f"{name}={as_typed}")
    return recipe


def seconds_of_steps(recipe: Recipe) -> float:
    """Run a recipe on the CPU, and return the seconds that all its steps take."""
    steps: int = recipe.training_arguments()["max_steps"]
    with tempfile.TemporaryDirectory() as folder:
        record = run(recipe, device=CPU, folder=Path(folder))
    return steps * (record.step_time_s or 0)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- and held against it ----


def write(folder: Path, recipe: Recipe, device: str, measured: dict[str, list[float]]) -> None:
    """Write `time.csv`, with the median of several speeds, and for a CPU their range."""
    columns = ["label", "steps", *KINDS, "estimated_speed", "measured_speed"]
    if device == CPU:
        columns += ["slowest", "fastest"]
    baseline = candidate(recipe, device)
    with (folder / "time.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        for label, speeds in measured.items():
            changed = candidate(apply_label(recipe, label), device, baseline)
            steps = changed.recipe.training_arguments()["max_steps"]
            work = [changed.predicted.work.get(kind, 0) for kind in KINDS]
            shown_speeds = [1 / (1 + changed.extra_time), statistics.median(speeds)]
            print(f"{shown_speeds[0]:6.2f} × estimated {shown_speeds[1]:6.2f} × measured  {label}")
            if device == CPU:
                shown_speeds += [min(speeds), max(speeds)]
            table.writerow([label, steps, *work, *map("{:.4f}".format, shown_speeds)])


def candidate(recipe: Recipe, device: str, baseline: Candidate | None = None) -> Candidate:
    return Candidate(recipe, (), predict(recipe, device, engine=SHADOW), 0, baseline)


if __name__ == "__main__":
    {"h100": h100, "cpu": cpu, "rates": rates}[sys.argv[1]]()
