"""Estimated times held against measured speeds: tools/against_speeds.py

`data/reference/h100/gpt2-124m/comparison.csv` has the speeds of recipes on an H100. Each is predicted anew, by the
shadow, and `time.csv` beside it keeps what a step asks of the card, the estimated speed and the measured one, relative
to the baseline's.
"""

import csv
import re

from workbench.advise.candidate import Candidate
from workbench.paths import DATA
from workbench.predict.predict import SHADOW, predict
from workbench.recipe import Recipe
from workbench.techniques import REGISTRY

FOLDER = DATA / "reference" / "h100" / "gpt2-124m"
KINDS = ("fp32_flops", "half_flops", "memory_bytes", "bus_bytes")
ITS_OWN_TOKENS = "padding"  # pads its examples: tokens a second are those of other batches


def main() -> None:
    with (FOLDER / "comparison.csv").open(encoding="utf-8") as file:
        measured = {row["label"]: float(row["speed_ratio"]) for row in csv.DictReader(file)}
    baseline = candidate("baseline")
    with (FOLDER / "time.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["label", "steps", *KINDS, "estimated_speed", "measured_speed"])
        for label, speed in measured.items():
            if label == ITS_OWN_TOKENS:
                continue
            one = candidate(label, baseline)
            work = [one.predicted.work.get(kind, 0) for kind in KINDS]
            steps = one.recipe.training_arguments()["max_steps"]
            table.writerow([label, steps, *work, f"{1 / (1 + one.extra_time):.4f}", f"{speed:.4f}"])
            print(f"{1 / (1 + one.extra_time):6.2f} × estimated {speed:6.2f} × measured  {label}")


def candidate(label: str, baseline: Candidate | None = None) -> Candidate:
    """Of a label as `comparison.csv` has it."""
    found = re.findall(r"(\w+)(?:\(([^)]*)\))?(?: \+ |$)", label) if label != "baseline" else []
    techniques = tuple(REGISTRY[name].given(settings(text)) for name, text in found)
    recipe = Recipe(model="random:gpt2", sequence_length=1024, steps=13, dropout=0.1, techniques=techniques)
    return Candidate(recipe, (), predict(recipe, "h100", engine=SHADOW), 0, baseline)


def settings(text: str) -> dict[str, int | str]:
    pairs = (pair.split("=") for pair in text.split(", ") if pair)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


if __name__ == "__main__":
    main()
