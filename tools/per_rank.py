"""Predict one rank's memory, for GPT-2 of three sizes on 1 to 8 emulated GPUs: data/reference/ranks.csv and ranks.md.

    python tools/per_rank.py [MODEL …]

Each rank takes 8 × 1,024 tokens a step, however many ranks there are. Nothing here was measured on a GPU.
"""

import sys
from collections.abc import Sequence
from itertools import product

import pandas as pd

from workbench import Recipe, predict
from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.base.paths import DATA, write_whole
from workbench.techniques import parse_technique
from workbench.training.ranks.shards import SHARDS

MODELS = ("gpt2", "gpt2-medium", "gpt2-xl")
RANKS = (1, 2, 4, 8)
GPU = "h100"
BATCH = 8  # sequences of one rank in a step
LENGTH = 1024
TECHNIQUES = ("", "gradient_checkpointing")
TIME_LIMIT_S = 500
CSV = DATA / "reference" / "ranks.csv"
HEAD = f"""# One rank of several, by the emulated H100

Full fine-tuning in fp32 with AdamW, {BATCH} × {LENGTH:,} tokens on **each** rank: a step has more sequences the more
ranks there are. Allocated memory at the peak of a rank; in brackets what the allocator reserves. `none` is DDP, `zero…`
DeepSpeed, the others are FSDP2. Predicted in one process (`workbench predict --ranks N --shard KIND`): PyTorch's own
allocator under an emulated H100 (`emulated:{GPU}`), the other ranks played by PyTorch's fake process group. Nothing
here was measured on a GPU, and what NCCL takes for itself comes on top. Not predicted is what has so much on the host
that the 24 GB of the machine which made this table were too few. All numbers, by category: [ranks.csv](ranks.csv),
written by `python tools/per_rank.py`.
"""


def main() -> None:
    models = sys.argv[1:] or MODELS
    rows = pd.DataFrame([row(*cell) for cell in product(models, TECHNIQUES, SHARDS, RANKS)])
    table = pd.concat([rows_of_others(models), rows], ignore_index=True)
    table = table.sort_values("model", key=order_of_models, kind="stable", ignore_index=True)
    table.to_csv(CSV, index=False)
    write_whole(CSV.with_suffix(".md"), text(table))


def row(model: str, technique: str, shard: str, ranks: int) -> dict[str, object]:
    """Predict one cell; a remark says why there is none."""
    recipe = Recipe(
        model=model,
        effective_batch_size=BATCH * ranks,
        sequence_length=LENGTH,
        techniques=(parse_technique(technique),) if technique else (),
    )
    case: dict[str, object] = {"model": model, "technique": technique, "shard": shard, "ranks": ranks}
    try:
        prediction = predict(recipe, GPU, ranks=ranks, shard=shard, time_limit=TIME_LIMIT_S)
    except WorkbenchError as error:
        return case | {"remark": str(error)}
    figures = {
        "allocated_bytes": prediction.peak_allocated_bytes,
        "reserved_bytes": prediction.peak_reserved_bytes,
        "source": prediction.source,
        "fits": prediction.fits,
        "peak_phase": prediction.peak_phase,
    }
    return case | figures | prediction.by_category


def rows_of_others(models: Sequence[str]) -> pd.DataFrame:
    """Return the rows of other models that the file has already."""
    if not CSV.exists():
        return pd.DataFrame()
    table = pd.read_csv(CSV).fillna({"technique": ""})
    return table[~table["model"].isin(models)]


def order_of_models(names: pd.Series) -> pd.Series:
    return names.map(MODELS.index)


def text(table: pd.DataFrame) -> str:
    """Return the page: a table for each model, with and without the technique."""
    lines = [HEAD]
    for (model, technique), rows in table.groupby(["model", "technique"], sort=False):
        lines.append(f"\n## {', '.join(filter(None, [model, technique]))}\n")
        lines.append(line_of(["shard", "1 rank", *(f"{ranks} ranks" for ranks in RANKS[1:])]))
        lines.append("|---|" + "---|" * len(RANKS))
        for shard, cells in rows.groupby("shard", sort=False):
            lines.append(line_of([f"`{shard}`", *map(cell, cells.to_dict("records"))]))
    return "\n".join(lines) + "\n"


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(figures: dict[str, float]) -> str:
    if pd.isna(figures["allocated_bytes"]):
        return "not predicted"
    allocated = format_bytes(figures["allocated_bytes"])
    return f"{allocated} ({format_bytes(figures['reserved_bytes'])})"


if __name__ == "__main__":
    main()
