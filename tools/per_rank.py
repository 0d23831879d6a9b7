"""The memory of one rank, for GPT-2 of three sizes on 1 to 8 emulated GPUs: data/reference/ranks.csv and ranks.md.

    python tools/per_rank.py [MODEL …]

Each rank takes 8 × 1,024 tokens a step, however many ranks there are. Nothing here was measured on a GPU.
"""

import sys
from itertools import product
from pathlib import Path

import pandas as pd

from workbench import Recipe, predict
from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.techniques import parse_technique
from workbench.training.ranks.shards import SHARDS

MODELS, RANKS, GPU = ("gpt2", "gpt2-medium", "gpt2-xl"), (1, 2, 4, 8), "h100"
BATCH, LENGTH = 8, 1024  # of one rank
TECHNIQUES = ("", "gradient_checkpointing")
FOLDER = Path(__file__).parents[1] / "data" / "reference"
HEAD = f"""# One rank of several, by the emulated H100

Full fine-tuning in fp32 with AdamW, {BATCH} × {LENGTH:,} tokens on **each** rank: a step has more sequences the more
ranks there are. Allocated memory at the peak of a rank; in brackets what the allocator reserves. `none` is DDP, `zero…`
DeepSpeed, the others are FSDP2. Predicted in one process (`workbench predict --ranks N --shard KIND`): PyTorch's own
allocator under an emulated H100 (`emulated:{GPU}`), the other ranks played by PyTorch's fake process group. Nothing
here was measured on a GPU, and what NCCL takes for itself comes on top. Not predicted is what has so much on the host
that the 24 GB of the machine which made this table were too few. All numbers, by category: [ranks.csv](ranks.csv),
written by `python tools/per_rank.py`.
"""


def row(model: str, technique: str, shard: str, ranks: int) -> dict[str, object]:
    """One cell, or why there is none."""
    techniques = (parse_technique(technique),) if technique else ()
    recipe = Recipe(model=model, effective_batch_size=BATCH * ranks, sequence_length=LENGTH, techniques=techniques)
    asked = {"model": model, "technique": technique, "shard": shard, "ranks": ranks}
    try:
        found = predict(recipe, GPU, ranks=ranks, shard=shard, time_limit=500)
    except WorkbenchError as error:
        return {**asked, "remark": str(error)}
    sizes = {"allocated_bytes": found.peak_allocated_bytes, "reserved_bytes": found.peak_reserved_bytes}
    facts = {"source": found.source, "fits": found.fits, "peak_phase": found.peak_phase}
    return {**asked, **sizes, **facts, **found.by_category}


def text(table: pd.DataFrame) -> str:
    """A table for each model, with and without the technique."""
    parts = [HEAD]
    for (model, technique), rows in table.groupby(["model", "technique"], sort=False):
        parts.append(f"\n## {model}{', ' + technique if technique else ''}\n")
        parts.append("| shard | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |")
        parts.append("|---|" + "---|" * len(RANKS))
        for shard, cells in rows.groupby("shard", sort=False):
            parts.append(f"| `{shard}` | " + " | ".join(map(cell, cells.to_dict("records"))) + " |")
    return "\n".join(parts) + "\n"


def cell(of: dict[str, float]) -> str:
    if pd.isna(of["allocated_bytes"]):
        return "not predicted"
    return f"{format_bytes(int(of['allocated_bytes']))} ({format_bytes(int(of['reserved_bytes']))})"


def main() -> None:
    known = FOLDER / "ranks.csv"
    kept = pd.read_csv(known, keep_default_na=True).fillna({"technique": ""}) if known.exists() else pd.DataFrame()
    chosen = sys.argv[1:] or MODELS
    made = [row(*cell_of) for cell_of in product(chosen, TECHNIQUES, SHARDS, RANKS)]
    others = kept[~kept["model"].isin(chosen)] if len(kept) else kept
    table = pd.concat([others, pd.DataFrame(made)], ignore_index=True)
    table = table.sort_values("model", key=lambda names: names.map(MODELS.index), kind="stable", ignore_index=True)
    table.to_csv(known, index=False)
    (FOLDER / "ranks.md").write_text(text(table), encoding="utf-8")


if __name__ == "__main__":
    main()
