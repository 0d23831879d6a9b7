"""Records as a pandas DataFrame: one row a run, typed columns, and a CSV file that is safe in a spreadsheet."""

import csv
import json
import math
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pandas as pd

from workbench.base.categories import Category, Phase
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe

NULLABLE = {bool: "boolean", int: "Int64", float: "Float64"}  # pandas' own types, in which a value may be missing
RECIPE_FIELDS = ("corpus", "effective_batch_size", "sequence_length", "steps", "seed", "dropout")
LEFT_OUT = ("schema_version", "text_before", "text_after")
REPORTING = ("report_to", "run_name", "project", "trackio_space_id", "log_level")  # arguments that change no result
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # OWASP, "CSV Injection"


def records(folder: Path | None = None) -> pd.DataFrame:
    """All records as a tidy DataFrame, one row a run, oldest first, with typed columns.

    Export it with `records().to_parquet("runs.parquet")`, or for a spreadsheet with `to_csv(records(), "runs.csv")`.
    """
    return to_frame(read_all(folder))


def to_frame(records: list[Record]) -> pd.DataFrame:
    """Records as rows; numbers become nullable `Int64` and `Float64`, so that a missing one stays missing."""
    columns = list(_row(Record("", "", Status.OK, {}, "", "")))
    frame = pd.DataFrame([_row(record) for record in records], columns=columns)
    types = {**get_type_hints(Recipe), **get_type_hints(Record)}
    kinds = {name: _column_type(types.get(name, str)) for name in columns}
    kinds["rate_searched"] = "boolean"
    for name in columns:
        if name.endswith("_bytes"):  # those of each category and phase are keys of a record's dictionaries, not fields
            kinds[name] = "Int64"
    frame = frame.astype(kinds)
    return frame.assign(created_at=pd.to_datetime(frame["created_at"], utc=True, format="ISO8601").dt.as_unit("us"))


def _row(record: Record) -> dict[str, Any]:
    """Flat: scalars as they are, `<category>_bytes` at the peak, `<phase>_peak_bytes`."""
    settings = record.recipe_settings
    row: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name not in LEFT_OUT and not isinstance(value, dict | list):
            row[name] = value
    row["device"] = record.device
    row |= {name: settings.get(name) for name in RECIPE_FIELDS}
    row["techniques"] = "+".join(sorted(settings.get("techniques", {}))) or "baseline"
    arguments = {name: value for name, value in settings.get("arguments", {}).items() if name not in REPORTING}
    if settings.get("callbacks"):
        arguments["callbacks"] = settings["callbacks"]
    row["arguments"] = ""
    if arguments:
        row["arguments"] = json.dumps(arguments, sort_keys=True)
    row["rate_searched"] = _searched(record.rates_tried)
    for category in Category:
        row[f"{category}_bytes"] = record.by_category.get(category)
        if record.by_category and category not in record.by_category:  # there was nothing of it
            row[f"{category}_bytes"] = 0
    row |= {f"{phase}_peak_bytes": record.by_phase.get(phase) for phase in Phase}
    return row


def _searched(tried: dict[str, float | None]) -> bool:
    """Whether the best of the rates was found: one below it and one above it were tried too."""
    losses = []
    for rate in sorted(tried, key=float):
        loss = tried[rate]
        if loss is None:  # it diverged
            loss = math.inf
        losses.append(loss)
    return len(losses) > 2 and 0 < losses.index(min(losses)) < len(losses) - 1


def _column_type(kind: Any) -> str:
    """The pandas type for a field of this type, which may be an optional one."""
    for alternative in get_args(kind) or (kind,):
        if alternative in NULLABLE:
            return NULLABLE[alternative]
    return "string"


def to_csv(frame: pd.DataFrame, path: Path | str, *, index: bool = False) -> None:
    """Write a CSV file in which no text is a formula to a spreadsheet (`=cmd…` gets an apostrophe in front)."""
    safe = frame.map(escape_formula)
    safe.index = safe.index.map(escape_formula)
    safe.to_csv(path, index=index, quoting=csv.QUOTE_NONNUMERIC)  # else a `\r` in a text would begin a new row


def escape_formula(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula, with an apostrophe in front; anything else as it is."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value
