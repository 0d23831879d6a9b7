"""Make what the site's front page knows: `python tools/front_page.py`, which takes about half an hour.

The page answers without a kernel, so it has predictions of a grid (`front_grid.py`). This makes them on an emulated
A100 (`make emulator`), and writes `data/front/predictions.json`. It may be stopped: what was predicted waits in
`build/front`. Then it predicts choices that are not on the grid, each for the card it names, and writes how far the
page's answer is off. `picture` draws what other sites show of a link.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from front_grid import (
    ACCUMULATED,
    ADAPTERS,
    BATCHES,
    CATEGORIES,
    CLOSE,
    COLUMNS,
    FITS,
    MARGIN_MIB,
    MODELS,
    POINTS_LENGTH,
    REFERENCE,
    SWITCHES,
    Choice,
    Points,
    answer,
    extra_mib,
    grid,
    is_gpt2,
    is_predicted,
    key_of_grid,
    lengths_of,
    modes_of,
    recipe_of,
    sets_of,
    suits,
    switches_of,
)
from front_html import DATA, FRONT, PICTURE, fill_page

from workbench import __version__
from workbench.base.errors import UnavailableError
from workbench.base.paths import BUILD, versions, write_whole
from workbench.gpus.catalogue import COMMON, GIB, GPUS, MIB, Gpu
from workbench.gpus.emulator import place
from workbench.gpus.emulator.call import PROCESSES
from workbench.prediction import committed
from workbench.prediction.prediction import Prediction
from workbench.prediction.worker import ask_card, predict_on_card
from workbench.recipe import Recipe
from workbench.techniques import (
    REGISTRY,
    ChunkedCrossEntropy,
    FusedGelu,
    GradientAccumulation,
    GradientCheckpointing,
    Optimizer,
    PureBf16,
    StepInBackward,
)

MODES_IN_WORDS = {
    "full": {
        "title": "Every parameter, 32 bits",
        "loss": "same",
        "costs": "the Trainer's default",
        "command": [],
    },
    "mixed": {
        "title": "Mixed precision",
        "loss": "nearly",
        "costs": REGISTRY["mixed_precision"].costs,
        "command": ["mixed_precision"],
    },
    "bf16": {
        "title": "bf16 weights, FlashOptim's AdamW",
        "loss": "nearly",
        "costs": "8 significant bits, and what FlashOptim keeps of the rest; on GPT-2 124M the loss was a tie",
        "command": ["pure_bf16", "optimizer=kind:adamw_flash"],
    },
    "lora": {
        "title": "LoRA, mixed precision",
        "loss": "another",
        "costs": REGISTRY["lora"].costs,
        "command": ["lora", "mixed_precision"],
    },
    "qlora": {
        "title": "QLoRA, mixed precision",
        "loss": "another",
        "costs": REGISTRY["qlora"].costs,
        "command": ["qlora", "mixed_precision"],
    },
}
PRICES = {"gelu": 0, "acc": 1, "chunk": 2, "ckpt": 3}  # a higher price slows a step more
HEADLINE = (
    GradientCheckpointing(),
    ChunkedCrossEntropy(),
    FusedGelu(),
    PureBf16(),
    Optimizer(kind="adamw_4bit_stochastic"),
    StepInBackward(),
)
HEADLINE_WORDS = (
    "gradient checkpointing, a chunked cross-entropy, a fused GELU, bf16 weights, AdamW with states of 4 bits and a "
    "step within the backward pass"
)
HEADLINE_GPU = "rtx4060"
PER_PROCESS = 20  # a card's process keeps some 80 MB of each prediction, and gets slower with them
TIME_LIMIT_S = 600.0  # enough even where other programs keep the processors busy
LEFT_OUT = 100
SEED = 45


class Kept:
    """Predictions by recipe and card, a line of JSON each, in a file that outlives a run that was stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        self.new = 0
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.rows[row["key"]] = row

    def predict(self, recipe: Recipe, gpu: Gpu) -> dict[str, Any]:
        """Return what the page needs of a prediction, in MiB."""
        key = committed.key(recipe, gpu.name)
        if key not in self.rows:
            prediction = ask_emulator(recipe, gpu)
            row = {"key": key, "source": prediction.source, "fits": prediction.fits, **columns(prediction)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.rows[key] = row
            self.new += 1
            if self.new % PER_PROCESS == 0:
                PROCESSES.end()
        return self.rows[key]


def ask_emulator(recipe: Recipe, gpu: Gpu) -> Prediction:
    """Predict and raise as `predict` does, and keep nothing: 1,500 timelines are many."""
    return ask_card(gpu, predict_on_card, recipe, False, time_limit=TIME_LIMIT_S)


def columns(prediction: Prediction) -> dict[str, int]:
    sizes = {
        "reserved": prediction.peak_reserved_bytes or 0,
        "allocated": prediction.peak_allocated_bytes,
    }
    for name in CATEGORIES:
        sizes[name] = prediction.by_category[name]
    return {name: round(size / MIB) for name, size in sizes.items()}


def make_points(kept: Kept) -> Points:
    choices = list(grid())
    points: Points = {model: {} for model in MODELS}
    began_at = time.monotonic()
    for number, choice in enumerate(choices, 1):
        row = kept.predict(choice.recipe(), REFERENCE) | {"tokens": choice.tokens}
        curve = points[choice.model].setdefault(choice.curve, [])
        curve.append([row[name] for name in COLUMNS])
        if number % 50 == 0 or number == len(choices):
            minutes = (time.monotonic() - began_at) / 60
            print(f"{number:,} of {len(choices):,} predictions, {minutes:.0f} min: {choice.model}", flush=True)
    return points


# ---- how far that is off ----


def draw_choices() -> list[tuple[Choice, Gpu]]:
    """Draw choices between the points. Those of a card follow one another, since each card has a process."""
    draw = random.Random(SEED)
    drawn: list[tuple[Choice, Gpu]] = []
    while len(drawn) < LEFT_OUT:
        gpu = draw.choice(list(COMMON.values()))
        model = draw.choice(list(MODELS))
        mode, switches = draw.choice(list(sets_of(model)))
        batch = draw.choice(BATCHES)
        length = draw.choice(lengths_of(model))
        if batch > 1 and draw.random() < 0.25:
            switches = (ACCUMULATED, *switches)
        choice = Choice(model, mode, switches, batch, length)
        if not is_predicted(choice) and suits(model, mode, length, gpu):
            drawn.append((choice, gpu))
    return sorted(drawn, key=lambda pair: pair[1].name)


def check_choices(points: Points, kept: Kept) -> dict[str, Any]:
    """Predict each drawn choice for its own card, and hold that against what the page says of it."""
    rows = []
    for choice, gpu in draw_choices():
        row = compare(points, kept, choice, gpu)
        errors = f"need {row['error']:+.1%}, tensors {row['tensors_error']:+.1%}"
        print(f"{row['choice']}: {row['verdict']}, {errors}", flush=True)
        rows.append(row)
    worst = max(rows, key=lambda row: abs(row["error"]))
    return {
        "choices": len(rows),
        "wrong": sum(row["wrong"] for row in rows),
        "close": sum(row["verdict"] == CLOSE for row in rows),
        "mean_error": sum(abs(row["error"]) for row in rows) / len(rows),
        "worst_error": abs(worst["error"]),
        "worst": worst["choice"],
        "worst_tensors_error": max(abs(row["tensors_error"]) for row in rows),
    }


def compare(points: Points, kept: Kept, choice: Choice, gpu: Gpu) -> dict[str, Any]:
    page_says = answer(points, choice, gpu)
    real = kept.predict(choice.recipe(gpu), gpu)
    context = gpu.context_bytes_estimate / MIB
    said_to_fit = page_says.verdict == FITS
    return {
        "choice": f"{choice.model} {choice.curve} {choice.batch}×{choice.length} on {gpu.name}",
        "verdict": page_says.verdict,
        "wrong": page_says.verdict != CLOSE and said_to_fit != real["fits"],
        "error": page_says.need / (real["reserved"] + context) - 1,
        "tensors_error": page_says.tensors / (real["allocated"] + context) - 1,
    }


# ---- the file ----


def make_all() -> None:
    place.stub_folder()  # raises where there is no emulated GPU
    kept = Kept(BUILD / "front" / "predictions.jsonl")
    points = make_points(kept)
    data = {
        "made": made_facts(len(list(grid()))),
        "check": check_choices(points, kept),
        "headline": headline(),
        "columns": COLUMNS,
        "margin": MARGIN_MIB,
        "kind": REFERENCE.cublas_workspace_bytes,
        "batches": BATCHES,
        "adapters": ADAPTERS,
        "length": POINTS_LENGTH,
        "switches": switch_facts(),
        "modes": MODES_IN_WORDS,
        "cards": [card_facts(gpu) for gpu in COMMON.values()],
        "models": [model_facts(model, points[model]) for model in MODELS],
    }
    text = json.dumps(data, separators=(",", ":"))
    text = text.replace('"points":', '\n"points":')  # a line for each model, so that a change can be seen
    write_whole(DATA, f"{text}\n")


def made_facts(predictions: int) -> dict[str, Any]:
    return {
        "predictions": predictions,
        "source": f"emulated:{REFERENCE.name}",
        "card": REFERENCE.title,
        "context": REFERENCE.context_bytes_estimate // MIB,
        "versions": {name: versions()[name].partition("+")[0] for name in committed.LIBRARIES},
        "workbench": __version__,
        "generation": committed.GENERATION,
        "key": key_of_grid(),
    }


def headline() -> dict[str, Any]:
    """Return the page's headline: GPT-2 XL on a small card, in words and numbers."""
    gpu = GPUS[HEADLINE_GPU]
    recipe = recipe_of("gpt2-xl", list(HEADLINE), 8, 1024)
    prediction = ask_emulator(recipe, gpu)
    billions = prediction.trainable_parameters // 10**8 / 10  # rounded down, since people say 1.5 billion
    allocated = f"{prediction.peak_allocated_bytes / GIB:.1f}"
    return {
        "words": f"GPT-2 XL, all {billions} billion parameters, in {allocated} GiB",
        "parameters": prediction.trainable_parameters,
        "with_words": HEADLINE_WORDS,
        "batch": recipe.effective_batch_size,
        "length": recipe.sequence_length,
        "allocated": allocated,
        "need": f"{prediction.need_bytes / GIB:.1f}",
        "card": gpu.title.removeprefix("GeForce "),
        "source": prediction.source,
    }


def switch_facts() -> dict[str, dict[str, Any]]:
    """Return the switches in the page's order; `price` orders sets of equally many, the cheapest first."""
    techniques = {ACCUMULATED: GradientAccumulation(), **SWITCHES}
    facts = {}
    for name, technique in techniques.items():
        settings = "=steps:{batch}" if name == ACCUMULATED else ""  # the page fills in {batch}
        facts[name] = {
            "title": technique.title,
            "costs": technique.costs,
            "price": PRICES[name],
            "command": [f"{technique.name}{settings}"],
        }
    return facts


def card_facts(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "sold": gpu.data_sheet,
        "memory": round(gpu.memory_bytes / MIB, 1),
        "context": round(gpu.context_bytes_estimate / MIB, 1),
        "extra": round(extra_mib(gpu), 1),
        "kind": gpu.cublas_workspace_bytes,
        "bf16": gpu.device.computes_bf16,
        "fused": gpu.compute_capability >= (8, 0),
    }


def model_facts(model: str, curves: dict[str, list[list[int]]]) -> dict[str, Any]:
    shapes = set()
    accumulated = set()
    for choice in grid():
        if choice.model == model:
            of_its_kind = accumulated if choice.accumulates else shapes
            of_its_kind.add((choice.batch, choice.length))
    return {
        "name": model,
        "title": MODELS[model],
        "lengths": lengths_of(model),
        "grouped": not is_gpt2(model),
        "modes": modes_of(model),
        "switches": switches_of(model),
        "shapes": sorted(shapes),
        "accumulated": sorted(accumulated),
        "points": curves,
    }


# ---- the picture for links ----


def make_picture() -> None:
    """Let a browser draw the top of the page, 1,200 by 630 pixels."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise UnavailableError("picture: there is no chromium here. Install one: apt-get install chromium.")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for name in ("front.css", "front.js"):
            shutil.copy(FRONT / name, folder)
        page_file = Path(folder) / "index.html"
        page_file.write_text(fill_page(), encoding="utf-8")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1200, "height": 630}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=FRONT / PICTURE)
        chromium.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "picture"], default="all")
    if parser.parse_args().what == "all":
        make_all()
    make_picture()


if __name__ == "__main__":
    main()
