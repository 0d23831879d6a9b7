"""A lesson imports this and the techniques that it teaches, and nothing else of the workbench.

The middle of a lesson::

    gpt2 = recipe("auto", steps=12)
    runs = toggle(gpt2, GradientCheckpointing())
    table(runs)
    bars(runs)
"""

import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from typing import Any

import pandas as pd

import workbench
from workbench.advise.frame import to_frame
from workbench.base.categories import Category, Phase
from workbench.base.categories import format_bytes as size
from workbench.base.errors import OutOfMemoryError, UnavailableError
from workbench.base.paths import DATA
from workbench.journal.record import Record, Status, read_all
from workbench.lessons import pictures
from workbench.lessons.cards import cards, step_on_card
from workbench.lessons.cards import predict_known as predict
from workbench.lessons.exercise import exercise as check
from workbench.lessons.recipes import Variant, recipe, with_variants
from workbench.techniques.registry import in_words

__all__ = [
    "DATA",
    "Phase",
    "bars",
    "cards",
    "check",
    "curves",
    "measured_on_h100",
    "predict",
    "recipe",
    "size",
    "staircase",
    "step_on_card",
    "table",
    "toggle",
    "verdicts",
]

# a built page would keep every state of a progress bar
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# PEFT 0.21 asks transformers by this name, which is deprecated
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`")
# a run that could not be has its reason in the table, a sentence to be read whole
pd.set_option("display.max_colwidth", None)
# names that few lessons need, and the modules that are imported when one asks for them
ELSEWHERE = {
    "ask": "workbench.lessons.clinic",
    "all_pairs": "workbench.advise.pairs",
    "given": "workbench.advise.pairs",
    "in_words": "workbench.techniques.registry",
    "newest_out_of_memory": "workbench.advise.doctor",
    "read_message": "workbench.advise.message",
    "refused_pairs": "workbench.advise.pairs",
}
MIB = 2**20
GIB = 2**30
H100 = DATA / "reference" / "h100" / "gpt2-124m" / "comparison.csv"
LOSSES = DATA / "reference" / "cpu" / "gpt2-tiny" / "losses.csv"
BASELINE = "baseline"
# the smallest difference of losses with two digits: below it stands one digit and the power of ten
TWO_DIGITS_FROM = 1e-3
# pairs of runs beside each other that a speed needs
PAIRS = 2
# the columns of a table without others: most techniques shrink these
SHOWN = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)


def __getattr__(name: str) -> Any:
    """Return a picture by its name, as `checkpointed_blocks`, a name of ELSEWHERE, or one of `workbench`."""
    if name in pictures.__all__:
        return getattr(pictures, name)
    if name in ELSEWHERE:
        return getattr(import_module(ELSEWHERE[name]), name)
    if not name.startswith("_") and hasattr(workbench, name):
        return getattr(workbench, name)
    raise AttributeError(f"module 'workbench.lesson' has no attribute {name!r}")


def toggle(off: workbench.Recipe, *variants: Variant, seeds: int = 1) -> list[Record]:
    """Fine-tune with a technique off, and on: a record of the recipe, then one of each variant.

    All have the recipe's seed, and the customary learning rate of what they train. A run that is on record with the
    same text, versions and device is taken from there. What this machine cannot run, or has too little memory for, has
    a record that says so. With several seeds each recipe is run at the best rate of the same search, all of them take
    turns in time, and there is a record of every seed.

    Args:
        variants: a technique, or a tuple of several together.

    Raises ConfigurationError: a technique does not go with the recipe.
    """
    records = list(map(_record_of, with_variants(off, variants)))
    if seeds == 1 or records[0].status is not Status.OK:
        return records
    others = []
    failed = []
    for record in records[1:]:
        if record.status is Status.OK:
            others.append(record.recipe)
        else:
            failed.append(record)
    runs = workbench.side_by_side(off, *others, seeds=seeds, reuse=True)
    return [*chain(*runs), *failed]


def _record_of(variant: workbench.Recipe) -> Record:
    """Return the record of a run that ended well, or that could not be.

    An older record of the recipe is not taken for this run's.
    """
    older = {record.id for record in read_all(containing=variant.id)}
    try:
        return workbench.run(variant, reuse=True)
    except (UnavailableError, OutOfMemoryError):
        for record in reversed(read_all(containing=variant.id)):
            if record.id not in older and record.recipe_id == variant.id:
                return record
        raise


def table(records: Sequence[Record], *categories: str) -> pd.DataFrame:
    """Return one row a run: its peak, the most that each category took, the saved part of the peak, and the loss.

    `saved` and `losses differ by` compare with the baseline of the same seed, or else with the first record of that
    seed. The difference is the largest of a training loss at the same step: 0 is the same to the last bit, some 1e-06
    is the rounding of additions in another order. A run that came to no end has the reason in a last column.

    Args:
        categories: names of `Category`; without any, activations and logits.
    """
    rows = []
    for record in records:
        reference = _reference_of(record, records)
        row: dict[str, Any] = {"recipe": in_words(record.label), "peak MiB": _mib(record.peak_allocated_bytes)}
        for category in categories or SHOWN:
            row[f"{category.replace('_', ' ')} MiB"] = _mib(record.maximum_by_category.get(category))
        row["saved"] = _saving(record, reference)
        row["held-out loss"] = None if record.held_out_loss is None else round(record.held_out_loss, 4)
        row["losses differ by"] = _difference(record, reference)
        if record.status is not Status.OK:
            row["why there is no more"] = record.error
        rows.append(row)
    return pd.DataFrame(rows).set_index("recipe").rename_axis(None).fillna("")


def _reference_of(record: Record, records: Sequence[Record]) -> Record:
    """Return the record to compare with: the baseline of its seed, or else the first record of its seed."""
    seed = record.recipe_settings.get("seed")
    alike = [other for other in records if other.recipe_settings.get("seed") == seed]
    for other in alike:
        if other.label == BASELINE:
            return other
    return alike[0]


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / MIB, 1)


def _saving(record: Record, reference: Record) -> str:
    if record.peak_allocated_bytes is None or reference.peak_allocated_bytes is None:
        return ""
    return f"{1 - record.peak_allocated_bytes / reference.peak_allocated_bytes:.0%}".replace("-0%", "0%")


def _difference(record: Record, reference: Record) -> str:
    if not record.losses:
        return "no values" if record.status is Status.OK else ""
    if not reference.losses:
        return ""
    if len(record.losses) != len(reference.losses):
        return "other steps"
    largest = max(abs(a - b) for a, b in zip(record.losses, reference.losses, strict=True))
    if largest == 0:
        return "0"
    return f"{largest:.0e}" if largest < TWO_DIGITS_FROM else f"{largest:.2g}"


def bars(records: Sequence[Record], limit_bytes: int | None = None) -> Any:
    """Draw the peak of each run by category; `limit_bytes` is drawn as a line."""
    measured = [record for record in records if record.by_category]
    return workbench.plots.memory_bars(to_frame(measured), limit_bytes)


def curves(records: Sequence[Record]) -> Any:
    """Draw the training losses of the runs."""
    return workbench.plots.loss_curves(records)


def measured_on_h100(*labels: str) -> pd.DataFrame:
    """Return peak and speed of GPT-2 124M with 8 × 1,024 tokens a step, measured on an H100: a committed table.

    Args:
        labels: labels of recipes, as `Recipe.label` has them; the baseline comes first. Without any, all recipes.

    Raises KeyError for a recipe that was not measured.
    """
    rows = _chosen(_on_h100(), labels)
    peaks = rows["peak_allocated_bytes"]
    columns = {
        "peak GiB": (peaks / GIB).round(1),
        "saved": (1 - peaks / peaks[BASELINE]).map("{:.0%}".format),
        "speed": rows["speed_ratio"].map("{:.2f}×".format),
    }
    return pd.DataFrame(columns).rename_axis(None).rename(index=in_words)


def _chosen(rows: pd.DataFrame, labels: Sequence[str]) -> pd.DataFrame:
    """Return the row of the baseline and those of these labels; without labels, all."""
    if not labels:
        return rows
    return rows.loc[list(dict.fromkeys([BASELINE, *labels]))]


def _on_h100() -> pd.DataFrame:
    rows = pd.read_csv(H100, index_col="label").fillna({"techniques": ""})
    rows.loc[BASELINE, "speed_ratio"] = 1.0
    return rows


def staircase(records: Sequence[Record] = ()) -> Any:
    """Draw speed over peak: the recipes that are faster than all that need no more memory and do no more to the loss.

    Args:
        records: records of your runs; without any, the recipes measured on an H100 are drawn.

    Raises ConfigurationError without a baseline among the runs.
    """
    from workbench.lessons.staircase import draw_staircase

    if not records:
        return draw_staircase(_on_h100())
    compared = workbench.compare(to_frame([*records]))
    # one pair of runs has no speed: on a busy machine the same run differs by a tenth from time to time
    compared["speed_ratio"] = compared["speed_ratio"].where(compared["pairs"] >= PAIRS)
    return draw_staircase(compared)


def verdicts(*labels: str) -> pd.DataFrame:
    """Say whether a technique that changes the loss harmed it: a committed table of the embedded model, several seeds.

    Each recipe was run at the best rate of the same search, for 12 and for 48 steps of 8 × 128 tokens. `range` is the
    largest loss of the seeds less the smallest; a difference from the baseline within the larger of two ranges is a
    tie.

    Args:
        labels: labels of recipes, as for `measured_on_h100`.

    Raises KeyError for a recipe that is not in the table, as all exact ones.
    """
    rows = _chosen(pd.read_csv(LOSSES, index_col="label"), labels).reset_index()
    names = {
        "learning_rate": "best rate",
        "held_out_loss": f"held-out loss, mean of {rows['seeds'].min()} seeds",
        "held_out_loss_spread": "range",
        "loss_verdict": "against the baseline",
    }
    shown = rows.set_index(["steps", "label"])[[*names]].rename(columns=names).fillna("")
    in_order = shown.sort_index(level="steps", sort_remaining=False)
    return in_order.rename(index=in_words, level="label").rename_axis(["steps", None])
