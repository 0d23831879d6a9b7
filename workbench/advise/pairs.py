"""Which techniques go together: every pair measured, emulated, or refused with the reason."""

import html
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pandas as pd

from workbench.errors import ConfigurationError, OutOfMemoryError, UnavailableError
from workbench.gpus.emulator import place
from workbench.recipe import Recipe
from workbench.run.run import run
from workbench.techniques import REGISTRY

MEASURED, EMULATED, UNAVAILABLE = "measured", "emulated", "unavailable"
SAVED, BEYOND = "saved_fraction", "saved_beyond_fraction"
CARD = "emulated:h100"  # for what this machine cannot run


def pairs(
    recipe: Recipe, names: Iterable[str] | None = None, *, device: str | None = None, folder: Path | None = None
) -> pd.DataFrame:
    """Every technique alone and every pair of them, at their default settings, on one recipe.

    A pair that a recipe refuses costs nothing; the others are run; what this machine cannot run is run on an emulated
    H100, where an emulator is set up. Columns: `one`, `other` (equal for a technique alone), `verdict` (`measured`,
    `emulated`, `refused`, `unavailable`, `oom`, `failed`), `reason`, `peak_allocated_bytes`, `memory_source`,
    `saved_fraction` of the peak without techniques, and `saved_beyond_fraction`: how much of that peak the pair saves
    beyond the better of the two alone. Both are of the device that the row is from.

    Raises:
        ConfigurationError: a single step, after which no optimizer states have been used yet.
    """
    if recipe.steps < 2:
        raise ConfigurationError("pairs: steps must be at least 2: the states of an optimizer are not there before.")
    chosen = sorted(REGISTRY if names is None else names)
    here = _table(recipe.baseline, [(name, name) for name in chosen] + list(combinations(chosen, 2)), device, folder)
    lacking = here[here["verdict"] == UNAVAILABLE]
    if lacking.empty or not place.is_set_up():
        return here
    wanted = list(zip(lacking["one"], lacking["other"], strict=True))
    alone = [(name, name) for name in sorted({name for pair in wanted for name in pair})]
    there = _table(recipe.baseline, list(dict.fromkeys(alone + wanted)), CARD, folder).set_index(["one", "other"])
    both = pd.concat([here.drop(lacking.index), there.loc[wanted].reset_index()])
    return both.sort_values(["one", "other"], ignore_index=True)


def _table(recipe: Recipe, combined: list[tuple[str, str]], device: str | None, folder: Path | None) -> pd.DataFrame:
    base = run(recipe, device=device, reuse=True, folder=folder).peak_allocated_bytes or 0
    rows = [(one, other, *_tried(recipe, {one, other}, device, folder)) for one, other in combined]
    columns = ["one", "other", "verdict", "reason", "peak_allocated_bytes", "memory_source"]
    table = pd.DataFrame(rows, columns=columns).astype({"peak_allocated_bytes": "Int64"})
    alone = table[table["one"] == table["other"]].set_index("one")["peak_allocated_bytes"]
    better = pd.concat([table["one"].map(alone), table["other"].map(alone)], axis=1).min(axis=1, skipna=False)
    beyond = ((better - table["peak_allocated_bytes"]) / base).where(table["one"] != table["other"])
    return table.assign(**{SAVED: 1 - table["peak_allocated_bytes"] / base, BEYOND: beyond})


def _tried(
    recipe: Recipe, names: set[str], device: str | None, folder: Path | None
) -> tuple[str, str, int | None, str]:
    try:
        for name in sorted(names):
            recipe = recipe | REGISTRY[name]()
        record = run(recipe, device=device, reuse=True, folder=folder)
        verdict = EMULATED if record.memory_source.startswith("emulated") else MEASURED
        return verdict, "", record.peak_allocated_bytes, record.memory_source
    except UnavailableError as error:
        return UNAVAILABLE, str(error), None, ""
    except ConfigurationError as error:
        return "refused", str(error).removeprefix("recipe: "), None, ""
    except OutOfMemoryError as error:
        return "oom", str(error), None, ""
    except Exception as error:  # one pair that fails must not hide the others
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}", None, ""


def matrix(table: pd.DataFrame, column: str = SAVED) -> pd.DataFrame:
    """The pairs as a symmetric table of words: a part of the peak, or why there is none.

    A star marks what was emulated. Of a technique alone nothing is saved beyond it: `–`.
    """
    cells = table.assign(words=[_words(row, column) for _, row in table.iterrows()])
    mirrored = cells.rename(columns={"one": "other", "other": "one"})
    both = pd.concat([cells, mirrored]).drop_duplicates(["one", "other"])
    return both.pivot(index="one", columns="other", values="words").rename_axis(index=None, columns=None)


def _words(row: pd.Series, column: str) -> str:
    if row["verdict"] not in (MEASURED, EMULATED):
        return str(row["verdict"])
    star = "*" if row["verdict"] == EMULATED else ""
    return "–" if pd.isna(row[column]) else f"{round(row[column], 2) + 0:.0%}{star}"  # no minus before a zero


def style_pairs(table: pd.DataFrame, column: str = SAVED) -> "pd.io.formats.style.Styler":
    """The matrix as people read it: names of columns upright, the greener the more is saved; text escaped."""
    upright = {"selector": "th.col_heading", "props": "writing-mode: vertical-rl; text-align: left; max-height: 14em"}
    styler = matrix(table, column).style.format(escape="html").format_index(html.escape, axis=0)
    styler = styler.format_index(html.escape, axis=1).set_table_styles([upright])
    return styler.map(_shade)


def _shade(words: str) -> str:
    """CSS of a cell: green for what is saved, orange for what is added, the more the stronger; grey for no number."""
    part, percent, _ = words.partition("%")
    if not percent:
        return "color: #808080; font-size: 80%"
    saved = int(part)
    return f"background-color: rgba({'0, 158, 115' if saved > 0 else '213, 94, 0'}, {min(abs(saved), 100) / 100:.2f})"


def refusals(table: pd.DataFrame) -> pd.DataFrame:
    """Each reason once, with the pairs that it concerns."""
    kept = table[~table["verdict"].isin([MEASURED, EMULATED])].copy()
    kept["pair"] = [a if a == b else f"{a} + {b}" for a, b in zip(kept["one"], kept["other"], strict=True)]
    grouped = kept.groupby(["verdict", "reason"], sort=False)["pair"].agg(", ".join).reset_index()
    return grouped[["verdict", "pair", "reason"]]
