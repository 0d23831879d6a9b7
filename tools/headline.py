"""The headline: how far techniques go together, rung by rung, what they cost, and what other programs need.

    python tools/headline.py [--save FOLDER]     # prints the tables, and writes them as CSV

Memory is the emulated GPU's, where it is set up, or else the shadow's; which cards run out of memory, the emulated ones
say themselves. Losses are measured on this machine's CPU, on a small model, each set of techniques at the learning rate
that is best for it (`workbench.advise.fair`).
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from workbench.advise.compare import compare
from workbench.advise.fair import side_by_side
from workbench.advise.frame import to_frame
from workbench.base.categories import format_bytes, parse_bytes
from workbench.base.device import Device
from workbench.base.errors import OutOfMemoryError, UnavailableError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.launch import emulate
from workbench.prediction.predict import predict
from workbench.recipe import Recipe
from workbench.techniques import Numerics, Technique, parse_technique
from workbench.training.run import run


@dataclass(frozen=True)
class Rung:
    """A rung adds techniques to those of the rung before, or replaces them where they have the same name.

    `gpu` is the card that the rung is for, if not the ladder's, and `memory` what it has where that is not all.
    """

    adds: tuple[str, ...]
    gpu: str | None = None
    memory: str | None = None


@dataclass(frozen=True)
class Ladder:
    title: str
    model: str
    gpu: str
    rungs: tuple[Rung, ...]


@dataclass(frozen=True)
class Peer:
    """Another program: a script in `tools/peers` with its argument, and the package that it needs."""

    title: str
    command: tuple[str, ...]
    package: str | None = None


SMALL = Ladder(
    "GPT-2 124M, every parameter, 8 × 1,024 tokens a step",
    model="gpt2",
    gpu="rtx3090",
    rungs=(
        Rung(()),
        Rung(("gradient_checkpointing",)),
        Rung(("chunked_cross_entropy",)),
        Rung(("fused_gelu",)),
        Rung(("pure_bf16",)),
        Rung(("optimizer=kind:adamw_flash",)),
        Rung(("optimizer=kind:adamw_8bit_stochastic",)),
    ),
)
LARGE = Ladder(
    "GPT-2 XL, every parameter, 8 × 1,024 tokens a step",
    model="gpt2-xl",
    gpu="b200",
    rungs=(
        Rung(()),
        Rung(("gradient_checkpointing", "chunked_cross_entropy", "fused_gelu")),
        Rung(("pure_bf16",), "rtx4060ti-16gb"),
        Rung(("optimizer=kind:adamw_8bit_stochastic",), "rtx4070"),
        Rung(("optimizer=kind:adamw_4bit_stochastic", "step_in_backward"), "rtx4060"),
        Rung(("chunked_cross_entropy=chunk:64", "activation_offloading", "allocator"), "rtx4060", "6GiB"),
    ),
)
PEERS = (
    Peer("The Trainer's defaults", ("trainer.py",)),
    Peer("The Trainer with its own switches", ("trainer.py", "switched")),
    Peer("nanoGPT's step", ("nanogpt.py",)),
    Peer("TRL's SFTTrainer", ("sft.py",), "trl"),
    Peer("Unsloth, bf16 weights", ("full_unsloth.py",), "unsloth"),
    Peer(
        "Unsloth, bf16 weights, uncompiled, checkpoints on the host",
        ("full_unsloth.py", "uncompiled"),
        "unsloth",
    ),
)
SCRIPTS = Path(__file__).resolve().with_name("peers")
SHAPE: dict[str, Any] = {"effective_batch_size": 8, "sequence_length": 1024, "steps": 3}

# Every set of techniques gets the learning rate with its smallest held-out loss, and then so many seeds.
SEARCHED: dict[str, Any] = {"model": "gpt2-tiny", "steps": 12, "dropout": 0.0}
SEEDS = 3
LOSSES = ["held_out_loss", "held_out_loss_spread", "loss_difference", "loss_verdict", "learning_rate", "speed_ratio"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the tables there as CSV")
    folder = parser.parse_args(arguments).save
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    with redirect_stdout(sys.stderr):
        tables = dict(headline())
    for number, (title, table) in enumerate(tables.items()):
        print(f"{title}\n{as_text(table)}\n")
        if folder:
            table.assign(table=title).to_csv(folder / f"headline-{number}.csv", index=False)


def as_text(table: pd.DataFrame) -> str:
    """Return a table as text, without the bytes of each category, which only the files have."""
    columns = [name for name in table if name == "peak_allocated_bytes" or not name.endswith("_bytes")]
    formats = {"peak_allocated_bytes": format_bytes}
    return table[columns].to_string(index=False, float_format="{:.4g}".format, formatters=formats)


def headline() -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield every table with its title."""
    for ladder in (SMALL, LARGE):
        yield ladder.title, memory(ladder)
        cards = on_cards(ladder)
        if len(cards):
            yield f"{ladder.title}: on smaller and smaller cards", cards
    title = f"Held-out loss and speed of {SEARCHED['model']}, {SEARCHED['steps']} steps on this CPU"
    yield title, losses([*climb(SMALL), *climb(LARGE)])
    yield "What other programs need for GPT-2 124M, 8 × 1,024 tokens a step", peers()


def climb(ladder: Ladder) -> list[Recipe]:
    """Return the recipes of a ladder's rungs."""
    recipes = []
    techniques: dict[str, Technique] = {}
    for rung in ladder.rungs:
        for technique in map(parse_technique, rung.adds):
            techniques[technique.name] = technique
        recipes.append(Recipe(model=f"random:{ladder.model}", techniques=tuple(techniques.values()), **SHAPE))
    return recipes


def memory(ladder: Ladder) -> pd.DataFrame:
    """Predict each rung: its bytes, and its floating-point operations a step beside those of the first rung."""
    rows = []
    for rung, recipe in zip(ladder.rungs, climb(ladder), strict=True):
        prediction = predict(recipe, rung.gpu or ladder.gpu)
        row = {
            "label": " + ".join(rung.adds) or "plain",
            "peak_allocated_bytes": prediction.peak_allocated_bytes,
            "operations": prediction.flops,
            "memory_source": prediction.source,
        }
        for category, size in prediction.by_category.items():
            row[f"{category}_bytes"] = size
        rows.append(row)
    table = pd.DataFrame(rows)
    table["operations"] /= table["operations"][0]
    table.insert(2, "smaller", table["peak_allocated_bytes"][0] / table["peak_allocated_bytes"])
    return table


def on_cards(ladder: Ladder) -> pd.DataFrame:
    """Run each rung that names a card on that card, and the rung before it, and return how both ended."""
    columns = ["card", "memory", "the rung before", "this rung"]
    recipes = climb(ladder)
    rows = []
    for number, rung in enumerate(ladder.rungs):
        if rung.gpu:
            memory = rung.memory or find_gpu(rung.gpu).data_sheet
            before = how_it_ended(recipes[number - 1], rung.gpu, rung.memory)
            here = how_it_ended(recipes[number], rung.gpu, rung.memory)
            rows.append((rung.gpu, memory, before, here))
    return pd.DataFrame(rows, columns=columns)


def how_it_ended(recipe: Recipe, gpu: str, memory: str | None) -> str:
    """Return a run's status on an emulated card. The allocator may have what CUDA's context leaves of the memory."""
    cap = None
    if memory:
        cap = parse_bytes(memory, "headline") - find_gpu(gpu).context_bytes_estimate
    try:
        return str(run(recipe, device=f"emulated:{gpu}", memory_cap=cap).status)
    except OutOfMemoryError:
        return "out of memory"
    except UnavailableError:
        return "not judged: no emulator here"


def losses(recipes: Iterable[Recipe]) -> pd.DataFrame:
    """Return the held-out loss of each set of techniques on the small model, at its best rate, and the verdict on it.

    Its speed beside the baseline's is there too, where others left the machine alone.
    """
    cpu = Device.find("cpu")
    small_recipes = {}
    for recipe in recipes:
        small = on_the_small_model(recipe, cpu)
        if small:
            small_recipes[small.label] = small
    baseline, *others = small_recipes.values()  # a ladder's first rung has no technique
    runs = side_by_side(baseline, *others, seeds=SEEDS, device="cpu", reuse=True)
    table = compare(to_frame(list(chain.from_iterable(runs))))
    return table.loc[list(small_recipes), LOSSES].rename_axis("techniques").reset_index()


def on_the_small_model(recipe: Recipe, cpu: Device) -> Recipe | None:
    """Return a recipe for the small model and this CPU, without techniques that need a GPU and change no loss.

    None: a technique needs a GPU and changes the loss.
    """
    techniques = []
    for technique in recipe.techniques:
        if not technique.missing(cpu):
            techniques.append(technique)
        elif technique.numerics is not Numerics.EXACT:
            return None
    return Recipe(techniques=tuple(techniques), **SEARCHED)


def peers(gpu: str = "rtx3090") -> pd.DataFrame:
    """Run other programs as they are on the emulated GPU, and return what a step of this model and batch needs."""
    rows = []
    for peer in PEERS:
        title = peer.title
        if peer.package and find_spec(peer.package) is None:
            rows.append((title, pd.NA, f"not tried: pip install {peer.package}"))
            continue
        if peer.package:
            title += f", {peer.package} {version(peer.package)}"
        rows.append((title, peak_of(peer, gpu), f"emulated:{gpu}"))
    return pd.DataFrame(rows, columns=["program", "peak_allocated_bytes", "source"])


def peak_of(peer: Peer, gpu: str) -> Any:
    """Return the most bytes that a program allocated on the emulated GPU; NA: it used no card."""
    script, *arguments = peer.command
    command = ["python", str(SCRIPTS / script), *arguments]
    emulation = emulate(command, find_gpu(gpu), history=False, output=sys.stderr)
    peaks = []
    for process in emulation.processes:
        peaks += [device["peak_allocated_bytes"] for device in process["devices"]]
    return max(peaks, default=pd.NA)


if __name__ == "__main__":
    main()
