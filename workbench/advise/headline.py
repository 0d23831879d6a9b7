"""The headline: how far techniques go together, rung by rung, what they cost, and what other programs need.

    python -m workbench headline

Memory is the emulated GPU's, where it is set up, or else the shadow's; which cards run out of memory, the emulated ones
say themselves. Losses are measured on this machine's CPU, on a small model, each set of techniques at the learning rate
that is best for it (`workbench.advise.fair`).
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pandas as pd

from workbench.advise.compare import BASELINE, compare, verdict
from workbench.advise.fair import side_by_side
from workbench.advise.frame import to_frame
from workbench.errors import OutOfMemoryError, UnavailableError
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.gpus.emulator.launch import emulate
from workbench.measure.categories import parse_bytes
from workbench.measure.device import Device
from workbench.paths import DATA, beside
from workbench.predict.predict import predict
from workbench.recipe import Recipe
from workbench.run.run import run
from workbench.techniques import Numerics, Technique, parse_technique

PLAN: dict[str, Any] = beside(__file__, "headline.toml")
SHAPE: dict[str, Any] = {"effective_batch_size": 8, "sequence_length": 1024, "steps": 3}
PEERS = DATA / "reference" / "peers"
LOSSES = ["held_out_loss", "held_out_loss_spread", "loss_difference", "loss_verdict", "learning_rate", "speed_ratio"]


def climbed(ladder: Mapping[str, Any]) -> list[Recipe]:
    """The recipes of a ladder's rungs."""
    found: list[Recipe] = []
    chosen: dict[str, Technique] = {}
    for rung in ladder["rungs"]:
        chosen |= {technique.name: technique for technique in map(parse_technique, rung["adds"])}
        found.append(Recipe(model=f"random:{ladder['model']}", techniques=tuple(chosen.values()), **SHAPE))
    return found


def headline() -> Iterator[tuple[str, pd.DataFrame]]:
    """Every table, with its title."""
    sets: list[Recipe] = []
    for ladder in PLAN["ladder"]:
        yield ladder["title"], memory(ladder)
        if len(ended := on_cards(ladder)):
            yield f"{ladder['title']}: on smaller and smaller cards", ended
        sets += climbed(ladder)
    search = PLAN["search"]
    yield f"Held-out loss and speed of {search['model']}, {search['steps']} steps on this CPU", losses(sets)
    yield "What other programs need for GPT-2 124M, 8 × 1,024 tokens a step", peers()


def memory(ladder: Mapping[str, Any]) -> pd.DataFrame:
    """What each rung needs: bytes, and floating-point operations of a step beside those of the first rung."""
    rows = []
    for rung, recipe in zip(ladder["rungs"], climbed(ladder), strict=True):
        found = predict(recipe, rung.get("gpu", ladder["gpu"]))
        parts = {f"{category}_bytes": size for category, size in found.by_category.items()}
        row = {"label": " + ".join(rung["adds"]) or "plain", "peak_allocated_bytes": found.peak_allocated_bytes}
        rows.append({**row, "operations": found.flops, "memory_source": found.source, **parts})
    table = pd.DataFrame(rows)
    table["operations"] /= table["operations"][0]
    table.insert(2, "smaller", table["peak_allocated_bytes"][0] / table["peak_allocated_bytes"])
    return table


def on_cards(ladder: Mapping[str, Any]) -> pd.DataFrame:
    """Of the rungs that name a card: whether a run there ends, and one on the rung before."""
    recipes, rows = climbed(ladder), []
    for number, rung in enumerate(ladder["rungs"]):
        if "gpu" in rung:
            cap = rung.get("memory")
            words = [_ended(recipe, rung["gpu"], cap) for recipe in (recipes[number - 1], recipes[number])]
            rows.append((rung["gpu"], cap or find_gpu(rung["gpu"]).data_sheet, *words))
    return pd.DataFrame(rows, columns=["card", "memory", "the rung before", "this rung"])


def _ended(recipe: Recipe, gpu: str, memory: str | None) -> str:
    """The allocator may have what CUDA's context leaves it."""
    cap = memory and parse_bytes(memory, "headline") - find_gpu(gpu).context_bytes_estimate
    try:
        return str(run(recipe, device=f"emulated:{gpu}", memory_cap=cap or None).status)
    except OutOfMemoryError:
        return "out of memory"
    except UnavailableError:
        return "not judged: no emulator here"


def losses(recipes: Iterable[Recipe]) -> pd.DataFrame:
    """The held-out loss of each set of techniques on the small model, at its best rate, the verdict on it, and its
    speed beside the baseline's, where others left the machine alone.

    What needs a GPU and changes no loss is left out; a set that needs one is not in the table.
    """
    search, sets = PLAN["search"], {}
    for recipe in recipes:
        cpu = Device.find("cpu")
        kept = tuple(t for t in recipe.techniques if t.numerics is not Numerics.EXACT or not t.missing(cpu))
        if not any(technique.missing(cpu) for technique in kept):
            small = Recipe(model=search["model"], steps=search["steps"], dropout=0.0, techniques=kept)
            sets[small.label] = small
    base = next(iter(sets.values())).baseline
    others = [each for each in sets.values() if each != base]
    found = side_by_side(base, *others, seeds=search["seeds"], device="cpu", reuse=True)
    table = compare(to_frame(list(chain.from_iterable(found))))
    return table.loc[list(sets), LOSSES].rename_axis("techniques").reset_index()


def judged(losses: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Held-out losses over seeds by label, at rates that were searched: mean, spread, and the verdict of `compare`."""
    table = pd.DataFrame({label: pd.Series(found) for label, found in losses.items()}).agg(["mean", "max", "min"]).T
    found = pd.DataFrame({"held_out_loss": table["mean"], "held_out_loss_spread": table["max"] - table["min"]})
    found["loss_difference"] = found["held_out_loss"] - found["held_out_loss"][BASELINE]
    found = found.assign(rate_searched=True)
    found["loss_verdict"] = found.apply(verdict, axis=1, base=found.loc[BASELINE])
    return found.drop(columns="rate_searched").rename_axis("techniques").reset_index()


def peers(gpu: str = "rtx3090") -> pd.DataFrame:
    """What other programs need for a step of the same model and batch: each runs as it is, on the emulated GPU."""
    rows = []
    for peer in PLAN["peer"]:
        if (package := peer.get("needs")) and find_spec(package) is None:
            rows.append((peer["title"], pd.NA, f"not tried: pip install {package}"))
            continue
        title = f"{peer['title']}, {package} {version(package)}" if package else peer["title"]
        script, *words = peer["script"].split()
        found = emulate(["python", str(PEERS / script), *words], find_gpu(gpu), history=False, output=sys.stderr)
        peak = max((d["peak_allocated_bytes"] for p in found.processes for d in p["devices"]), default=pd.NA)
        rows.append((title, peak, f"emulated:{gpu}"))
    return pd.DataFrame(rows, columns=["program", "peak_allocated_bytes", "source"])
