"""Records as a pandas DataFrame: one row a run, typed columns, and a CSV file that is safe in a spreadsheet."""

import csv
import json
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd

from workbench.measure.categories import Category, Phase
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all

NULLABLE = {bool: "boolean", int: "Int64", float: "Float64"}  # pandas' own types, in which a value may be missing
ASKED = ("corpus", "effective_batch_size", "sequence_length", "steps", "seed", "dropout")
LEFT_OUT = ("schema_version", "text_before", "text_after")
TOLD = ("report_to", "run_name", "project", "trackio_space_id", "log_level")  # arguments that change no result
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # OWASP, "CSV Injection"


def records(folder: Path | None = None) -> pd.DataFrame:
    """All records as a tidy DataFrame, one row a run, oldest first, with typed columns.

    Export it with `records().to_parquet("runs.parquet")`, or for a spreadsheet with `to_csv(records(), "runs.csv")`.
    """
    return to_frame(read_all(folder))


def to_frame(found: list[Record]) -> pd.DataFrame:
    """Records as rows; numbers become nullable `Int64` and `Float64`, so that a missing one stays missing."""
    columns = list(_row(Record("", "", Status.OK, {}, "", "")))
    frame = pd.DataFrame([_row(record) for record in found], columns=columns)
    types = {**get_type_hints(Recipe), **get_type_hints(Record)}
    # the bytes of each category and phase are keys of a record's dictionaries, not fields
    kinds = {name: "Int64" if name.endswith("_bytes") else _column_type(types.get(name, str)) for name in columns}
    kinds["rate_searched"] = "boolean"
    frame = frame.astype(kinds)
    return frame.assign(created_at=pd.to_datetime(frame["created_at"], utc=True, format="ISO8601").dt.as_unit("us"))


def _row(record: Record) -> dict[str, Any]:
    """Flat: scalars as they are, `<category>_bytes` at the peak, `<category>_maximum_bytes` whenever that was,
    `<phase>_peak_bytes`."""
    recipe, flat = record.recipe, {k: v for k, v in vars(record).items() if not isinstance(v, dict | list)}
    flat = {name: value for name, value in flat.items() if name not in LEFT_OUT}
    asked = {name: recipe.get(name) for name in ASKED}
    categories = {f"{c}_bytes": record.by_category.get(c, 0 if record.by_category else None) for c in Category}
    categories |= {f"{c}_maximum_bytes": record.maximum_by_category.get(c) for c in Category}
    phases = {f"{p}_peak_bytes": record.by_phase.get(p) for p in Phase}
    techniques = "+".join(sorted(recipe.get("techniques", {}))) or "baseline"
    passed = {name: value for name, value in recipe.get("arguments", {}).items() if name not in TOLD}
    passed |= {"callbacks": recipe["callbacks"]} if recipe.get("callbacks") else {}
    also: dict[str, Any] = {"techniques": techniques, "arguments": json.dumps(passed, sort_keys=True) if passed else ""}
    also |= {"rate_searched": _searched(record.rates_tried)}
    return {**flat, "device": record.device, **asked, **also, **categories, **phases}


def _searched(tried: dict[str, float | None]) -> bool:
    """Whether the best of the rates was found: one below it and one above it were tried too."""
    rates = sorted(tried, key=float)
    losses = [math.inf if (loss := tried[rate]) is None else loss for rate in rates]
    return len(rates) > 2 and 0 < losses.index(min(losses)) < len(rates) - 1


def _column_type(kind: Any) -> str:
    """The pandas type for a field of this type, which may be an optional one."""
    return next((NULLABLE[one] for one in get_args(kind) or (kind,) if one in NULLABLE), "string")


def to_csv(frame: pd.DataFrame, path: Path | str, *, index: bool = False) -> None:
    """Write a CSV file in which no text is a formula to a spreadsheet (`=cmd…` gets an apostrophe in front)."""
    safe = frame.map(escape_formula)
    safe.index = safe.index.map(escape_formula)
    safe.to_csv(path, index=index, quoting=csv.QUOTE_NONNUMERIC)  # else a `\r` in a text would begin a new row


def escape_formula(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula, with an apostrophe in front; anything else as it is."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
