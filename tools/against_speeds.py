"""Estimated times held against measured speeds.

    tools/against_speeds.py h100         # the speeds of h100/gpt2-124m/comparison.csv, each recipe predicted anew
    tools/against_speeds.py cpu          # every recipe of cpu/*/comparison.csv run and predicted here (15 minutes)
    tools/against_speeds.py rates        # what this machine's CPU does in a second, for "cpu" in gpus/rates.json

`time.csv` beside a comparison keeps what a step asks of the device, the estimated speed and the measured one, relative
to the baseline's; of a CPU with the slowest and the fastest of three runs.
"""

import csv
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from workbench.advise.candidate import Candidate
from workbench.base.paths import DATA
from workbench.prediction.predict import CPU, SHADOW, predict
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY
from workbench.training.run import run

REFERENCE = DATA / "reference"
KINDS = ("fp32_flops", "half_flops", "memory_bytes", "bus_bytes")
ITS_OWN_TOKENS = "padding"  # pads its examples: tokens a second are those of other batches
ON_AN_H100 = Recipe(model="random:gpt2", sequence_length=1024, steps=13, dropout=0.1)
ON_A_CPU = {"gpt2-tiny": Recipe(steps=12), "gpt2-124m": Recipe(model="random:gpt2", effective_batch_size=4, steps=4)}
ROUNDS = 3


def h100() -> None:
    folder = REFERENCE / "h100" / "gpt2-124m"
    with (folder / "comparison.csv").open(encoding="utf-8") as file:
        measured = {row["label"]: float(row["speed_ratio"]) for row in csv.DictReader(file)}
    write(folder, ON_AN_H100, "h100", {label: [speed] for label, speed in measured.items()})


def cpu() -> None:
    """Round by round, so that whatever else the machine does meanwhile meets every recipe alike."""
    for name, recipe in ON_A_CPU.items():
        seconds: dict[str, list[float]] = {label: [] for label in labels(REFERENCE / "cpu" / name)}
        for _ in range(ROUNDS):
            for label, found in seconds.items():
                of_all_steps = applied(recipe, label).training_arguments()["max_steps"]
                with tempfile.TemporaryDirectory() as folder:
                    done = run(applied(recipe, label), device=CPU, folder=Path(folder))
                found.append(of_all_steps * (done.step_time_s or 0))
                print(f"{found[-1]:8.2f} s  {label}", flush=True)
        usual = statistics.median(seconds["baseline"])
        write(REFERENCE / "cpu" / name, recipe, CPU, {n: [usual / one for one in s] for n, s in seconds.items()})


def rates() -> None:
    """The best of several tries: products as wide as those of GPT-2 124M, 64 MiB added to and written to the disk."""
    narrow, wide = torch.randn(1024, 768), torch.randn(768, 3072)
    narrow_16, wide_16, many = narrow.bfloat16(), wide.bfloat16(), torch.randn(2**24)
    with tempfile.NamedTemporaryFile() as file:
        tried: dict[str, tuple[Callable[[], object], int]] = {
            "fp32_flops": (lambda: narrow @ wide, 2 * 1024 * 768 * 3072),
            "half_flops": (lambda: narrow_16 @ wide_16, 2 * 1024 * 768 * 3072),
            "memory_bytes": (lambda: many + 1, 2 * many.nbytes),
            "bus_bytes": (lambda: torch.save(many, file.name), many.nbytes),
        }
        for kind, (work, amount) in tried.items():
            print(f"{kind:12} {amount / min(map(taken, [work] * 10)):.2e}")


def taken(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def labels(folder: Path) -> list[str]:
    with (folder / "comparison.csv").open(encoding="utf-8") as file:
        return [row["label"] for row in csv.DictReader(file) if not row["label"].startswith(ITS_OWN_TOKENS)]


def write(folder: Path, recipe: Recipe, device: str, measured: dict[str, list[float]]) -> None:
    """`time.csv`; of several speeds the median, and the range."""
    baseline = candidate(recipe, device)
    with (folder / "time.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        several = ["slowest", "fastest"] if device == CPU else []
        table.writerow(["label", "steps", *KINDS, "estimated_speed", "measured_speed", *several])
        for label, speeds in measured.items():
            if label.startswith(ITS_OWN_TOKENS):
                continue
            one = candidate(applied(recipe, label), device, baseline)
            work = [one.predicted.work.get(kind, 0) for kind in KINDS]
            steps = one.recipe.training_arguments()["max_steps"]
            told = [
                1 / (1 + one.extra_time),
                statistics.median(speeds),
                *([min(speeds), max(speeds)] if several else []),
            ]
            table.writerow([label, steps, *work, *(f"{speed:.4f}" for speed in told)])
            print(f"{told[0]:6.2f} × estimated {told[1]:6.2f} × measured  {label}")


def candidate(recipe: Recipe, device: str, baseline: Candidate | None = None) -> Candidate:
    return Candidate(recipe, (), predict(recipe, device, engine=SHADOW), 0, baseline)


def applied(recipe: Recipe, label: str) -> Recipe:
    """With the techniques of a label as `comparison.csv` has it."""
    found: Iterable[tuple[str, str]] = re.findall(r"(\w+)(?:\(([^)]*)\))?(?: \+ |$)", label)
    for name, text in found if label != "baseline" else ():
        recipe |= REGISTRY[name].given(settings(text))
    return recipe


def settings(text: str) -> dict[str, int | str]:
    pairs = (pair.split("=") for pair in text.split(", ") if pair)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


if __name__ == "__main__":
    {"h100": h100, "cpu": cpu, "rates": rates}[sys.argv[1]]()
