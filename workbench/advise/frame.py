"""Records as a pandas DataFrame: one row a run, typed columns, and a CSV file that is safe in a spreadsheet."""

import csv
import json
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd

from workbench.advise.index import read_frame
from workbench.base.categories import Category, Phase
from workbench.base.paths import runs_folder
from workbench.journal.record import Record, Status
from workbench.recipe import Recipe

# Types of pandas in which a value may be missing.
NULLABLE = {bool: "boolean", int: "Int64", float: "Float64"}
RECIPE_FIELDS = ("corpus", "effective_batch_size", "sequence_length", "steps", "seed", "dropout")
LEFT_OUT = ("schema_version", "text_before", "text_after")
# Arguments that change no result: two runs that differ in them are comparable.
REPORTING = ("report_to", "run_name", "project", "trackio_space_id", "log_level")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # first characters of a formula: OWASP, "CSV Injection"


def records(folder: Path | None = None) -> pd.DataFrame:
    """Return all records as a tidy DataFrame: one row for each run, oldest first, with typed columns.

    Export it with `records().to_parquet("runs.parquet")`, or for a spreadsheet with `to_csv(records(), "runs.csv")`.
    """
    return read_frame(folder or runs_folder(), to_frame)


def to_frame(records: list[Record]) -> pd.DataFrame:
    """Return records as rows. Numbers become nullable `Int64` and `Float64`, so that a missing one stays missing."""
    columns = list(_row(Record("", "", Status.OK, {}, "", "")))
    types = {**get_type_hints(Recipe), **get_type_hints(Record), "rate_searched": bool}
    column_types = {}
    for name in columns:
        column_types[name] = _column_type(types.get(name, str))
        # The bytes of each category and phase are keys of a record's dictionaries, and have no type of a field.
        if name.endswith("_bytes"):
            column_types[name] = "Int64"
    frame = pd.DataFrame(map(_row, records), columns=columns).astype(column_types)
    began = pd.to_datetime(frame["created_at"], utc=True, format="ISO8601")
    return frame.assign(created_at=began.dt.as_unit("us"))


def _row(record: Record) -> dict[str, Any]:
    """Return a record as one flat row: scalars as they are, `<category>_bytes` at the peak, `<phase>_peak_bytes`."""
    settings = record.recipe_settings
    row: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name not in LEFT_OUT and not isinstance(value, dict | list):
            row[name] = value
    row["device"] = record.device
    for name in RECIPE_FIELDS:
        row[name] = settings.get(name)
    row["techniques"] = "+".join(sorted(settings.get("techniques", {}))) or "baseline"
    arguments = dict(settings.get("arguments", {}))
    for name in REPORTING:
        arguments.pop(name, None)
    if settings.get("callbacks"):
        arguments["callbacks"] = settings["callbacks"]
    row["arguments"] = json.dumps(arguments, sort_keys=True) if arguments else ""
    row["rate_searched"] = _is_searched(record.rates_tried)
    unnamed = 0 if record.by_category else None  # beside other categories, one without a number had nothing
    for category in Category:
        row[f"{category}_bytes"] = record.by_category.get(category, unnamed)
    for phase in Phase:
        row[f"{phase}_peak_bytes"] = record.by_phase.get(phase)
    return row


def _is_searched(tried: dict[str, float | None]) -> bool:
    """Whether the best of the rates was found: a lower and a higher one were tried too."""
    if len(tried) < 3:
        return False
    losses = pd.Series(tried, dtype=float).fillna(math.inf)  # a rate without a loss has diverged
    losses = losses.sort_index(key=lambda rates: rates.astype(float))
    return bool(0 < losses.argmin() < len(losses) - 1)


def _column_type(annotation: Any) -> str:
    """Return the pandas type for a field of this type, which may be an optional one."""
    for alternative in get_args(annotation) or (annotation,):
        if alternative in NULLABLE:
            return NULLABLE[alternative]
    return "string"


def to_csv(frame: pd.DataFrame, path: Path | str, *, index: bool = False) -> None:
    """Write a CSV file in which a spreadsheet takes no text for a formula (`=cmd…` gets an apostrophe in front)."""
    safe = frame.map(escape_formula)
    safe.index = safe.index.map(escape_formula)
    # Without quotes, a `\r` in a text would begin a new row.
    safe.to_csv(path, index=index, quoting=csv.QUOTE_NONNUMERIC)


def escape_formula(value: Any) -> Any:
    """Return a text that a spreadsheet would take for a formula with an apostrophe in front, all else as it is."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value
