"""Pairs of techniques: the table that `tools/pairs.py` makes, shown as a matrix and as a list of refusals.

Its columns are `one` and `other`, the names of two techniques, equal for a technique alone; `verdict`, which is
`measured`, `emulated`, `refused`, `unavailable`, `oom` or `failed`, with the `reason`; and two parts of the peak
without techniques: `saved_fraction`, and `saved_beyond_fraction`, which the pair saves beyond the better of the two.
"""

import pandas as pd

from workbench.base.paths import DATA
from workbench.techniques import REGISTRY, Numerics
from workbench.techniques.registry import in_words

COMMITTED = DATA / "reference" / "cpu" / "gpt2-tiny" / "pairs.csv"
MEASURED = "measured"
EMULATED = "emulated"
SAVED = "saved_fraction"


def matrix(table: pd.DataFrame, column: str = SAVED) -> pd.DataFrame:
    """Return the pairs as a symmetric table of text: the part of the peak that is saved, or the verdict without one.

    A star marks an emulated pair. A technique alone saves nothing beyond itself: `–`.
    """
    cells = table.assign(cell=table.apply(_cell, axis=1, column=column))
    return _mirror(cells).pivot(index="one", columns="other", values="cell").rename_axis(index=None, columns=None)


def _cell(row: pd.Series, column: str) -> str:
    if row["verdict"] not in (MEASURED, EMULATED):
        return str(row["verdict"])
    if pd.isna(row[column]):
        return "–"
    fraction = round(row[column], 2) + 0  # the sum has no minus before a zero
    if row["verdict"] == EMULATED:
        return f"{fraction:.0%}*"
    return f"{fraction:.0%}"


def all_pairs(column: str = SAVED) -> "pd.io.formats.style.Styler":
    """Show the matrix of the committed table, which is of the embedded model.

    Args:
        column: the column to show: `saved_fraction`, or `saved_beyond_fraction` for what a pair saves beyond the better
            of its two.
    """
    return style_pairs(pd.read_csv(COMMITTED), column)


def refused_pairs() -> pd.DataFrame:
    """Return the reasons why some pairs of the committed table cannot be used."""
    return refusals(pd.read_csv(COMMITTED))


def given(*names: str) -> pd.DataFrame:
    """Return for each technique the exact one to add that saves most beside it, with the part of the peak that is saved
    without it and with it, from the committed table of the embedded model.

    Args:
        names: names of techniques.
    """
    exact = [name for name, cls in REGISTRY.items() if cls.numerics is Numerics.EXACT]
    saved = _mirror(pd.read_csv(COMMITTED)).pivot(index="one", columns="other", values=SAVED)
    rows = {}
    for name in names:
        beside = saved.loc[name].reindex(exact).drop(name, errors="ignore")
        alone = f"{saved.loc[name, name]:.0%}"
        add = in_words(beside.idxmax())
        rows[in_words(name)] = {"add": add, "saved alone": alone, "saved together": f"{beside.max():.0%}"}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("given")


def _mirror(table: pd.DataFrame) -> pd.DataFrame:
    """Return every pair in both orders, and a technique alone once."""
    swapped = table.rename(columns={"one": "other", "other": "one"})
    return pd.concat([table, swapped]).drop_duplicates(["one", "other"])


def style_pairs(table: pd.DataFrame, column: str = SAVED) -> "pd.io.formats.style.Styler":
    """Show the matrix for people: names of columns upright, the greener the more is saved. Text is escaped."""
    upright = {"selector": "th.col_heading", "props": "writing-mode: vertical-rl; text-align: left; max-height: 14em"}
    styler = matrix(table, column).style.format(escape="html").format_index(escape="html")
    return styler.format_index(escape="html", axis=1).set_table_styles([upright]).map(_shade)


def _shade(cell: str) -> str:
    """Return the CSS of a cell: green where memory is saved, orange where it is added, stronger for more; grey for no
    number."""
    number, percent, _ = cell.partition("%")
    if not percent:
        return "color: #808080; font-size: 80%"
    saved = int(number)
    colour = "0, 158, 115" if saved > 0 else "213, 94, 0"
    return f"background-color: rgba({colour}, {min(abs(saved), 100) / 100:.2f})"


def refusals(table: pd.DataFrame) -> pd.DataFrame:
    """Return each reason of a table once, with the pairs that it concerns."""
    refused = table[~table["verdict"].isin([MEASURED, EMULATED])].copy()
    alone = refused["one"] == refused["other"]
    refused["pair"] = refused["one"].where(alone, refused["one"] + " + " + refused["other"])
    grouped = refused.groupby(["verdict", "reason"], sort=False)["pair"].agg(", ".join).reset_index()
    return grouped[["verdict", "pair", "reason"]]
