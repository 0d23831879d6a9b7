"""Which techniques go together: every pair measured, or refused with the reason."""

import html
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path

import pandas as pd

from workbench.errors import ConfigurationError, OutOfMemoryError, UnavailableError
from workbench.recipe import Recipe
from workbench.run.run import run
from workbench.techniques import REGISTRY

MEASURED = "measured"


def pairs(
    recipe: Recipe, names: Iterable[str] | None = None, *, device: str | None = None, folder: Path | None = None
) -> pd.DataFrame:
    """Every technique alone and every pair of them, at their default settings, on one recipe.

    A pair that a recipe refuses costs nothing; the others are run. Columns: `one`, `other` (equal for a technique
    alone), `verdict` (`measured`, `refused`, `unavailable`, `oom`, `failed`), `reason`, `peak_allocated_bytes`,
    `saved_fraction` of the peak without techniques.
    """
    chosen = sorted(REGISTRY if names is None else names)
    base = run(recipe.baseline, device=device, reuse=True, folder=folder).peak_allocated_bytes or 0
    combined = [(name, name) for name in chosen] + list(combinations(chosen, 2))
    rows = [(one, other, *_tried(recipe.baseline, {one, other}, device, folder)) for one, other in combined]
    columns = ["one", "other", "verdict", "reason", "peak_allocated_bytes"]
    table = pd.DataFrame(rows, columns=columns).astype({"peak_allocated_bytes": "Int64"})
    return table.assign(saved_fraction=1 - table["peak_allocated_bytes"] / base)


def _tried(recipe: Recipe, names: set[str], device: str | None, folder: Path | None) -> tuple[str, str, int | None]:
    try:
        for name in sorted(names):
            recipe = recipe | REGISTRY[name]()
        return MEASURED, "", run(recipe, device=device, reuse=True, folder=folder).peak_allocated_bytes
    except UnavailableError as error:
        return "unavailable", str(error), None
    except ConfigurationError as error:
        return "refused", str(error).removeprefix("recipe: "), None
    except OutOfMemoryError as error:
        return "oom", str(error), None
    except Exception as error:  # one pair that fails must not hide the others
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}", None


def matrix(table: pd.DataFrame) -> pd.DataFrame:
    """The pairs as a symmetric table of words: the part of the peak that is saved, or why there is none."""
    words = [f"{row.saved_fraction:.0%}" if row.verdict == MEASURED else str(row.verdict) for row in table.itertuples()]
    cells = table.assign(words=words)
    mirrored = cells.rename(columns={"one": "other", "other": "one"})
    both = pd.concat([cells, mirrored]).drop_duplicates(["one", "other"])
    return both.pivot(index="one", columns="other", values="words").rename_axis(index=None, columns=None)


def style_pairs(table: pd.DataFrame) -> "pd.io.formats.style.Styler":
    """The matrix as people read it: names of columns upright, the greener the more is saved; text escaped."""
    upright = {"selector": "th.col_heading", "props": "writing-mode: vertical-rl; text-align: left; max-height: 14em"}
    styler = matrix(table).style.format(escape="html").format_index(html.escape, axis=0)
    styler = styler.format_index(html.escape, axis=1).set_table_styles([upright])
    return styler.map(_shade)


def _shade(words: str) -> str:
    """CSS of a cell: green for what is saved, orange for what is added, the more the stronger; grey for no number."""
    if not words.endswith("%"):
        return "color: #808080; font-size: 80%"
    saved = int(words[:-1])
    return f"background-color: rgba({'0, 158, 115' if saved > 0 else '213, 94, 0'}, {min(abs(saved), 100) / 100:.2f})"


def refusals(table: pd.DataFrame) -> pd.DataFrame:
    """Each reason once, with the pairs that it concerns."""
    kept = table[table["verdict"] != MEASURED].copy()
    kept["pair"] = [a if a == b else f"{a} + {b}" for a, b in zip(kept["one"], kept["other"], strict=True)]
    grouped = kept.groupby(["verdict", "reason"], sort=False)["pair"].agg(", ".join).reset_index()
    return grouped[["verdict", "pair", "reason"]]
