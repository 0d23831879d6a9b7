"""Predictions beside measurements: what a GPU would need for runs that were measured here."""

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pandas as pd

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, of_device
from workbench.measure.categories import Category, format_bytes
from workbench.predict.engine import engine_words
from workbench.predict.predict import CPU, predict
from workbench.recipe import Recipe
from workbench.records.record import Record

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler


def predictions_beside(records: Sequence[Record], gpu: str = "h100") -> pd.DataFrame:
    """One row for each label among the records, in their order; of several records with one label, the first.

    Columns: `measured_bytes` and `memory_source` of the record; `predicted_bytes`, `reserved_bytes`, `largest`
    (category at the peak), `peak_phase`, `peak_operation` and `prediction_source` of the prediction for `gpu`;
    `remark`: why there is none.
    """
    firsts: dict[str, Record] = {}
    for record in records:
        firsts.setdefault(record.label, record)
    table = pd.DataFrame([_row(record, gpu) for record in firsts.values()], index=[*firsts])
    table.index.name = "label"
    table.attrs["gpu"] = gpu
    return table.astype(dict.fromkeys(("measured_bytes", "predicted_bytes", "reserved_bytes"), "Int64"))


def _row(record: Record, gpu: str) -> dict[str, Any]:
    measured = {"measured_bytes": record.peak_allocated_bytes, "memory_source": record.memory_source}
    try:
        found = predict(Recipe.from_dict(record.recipe), gpu)
    except WorkbenchError as error:
        return {**measured, "predicted_bytes": None, "reserved_bytes": None, "remark": str(error)}
    return {
        **measured,
        "predicted_bytes": found.peak_allocated_bytes,
        "reserved_bytes": found.peak_reserved_bytes,
        "largest": max(Category, key=lambda category: found.by_category[category]),
        "peak_phase": found.peak_phase,
        "peak_operation": found.peak_operation,
        "prediction_source": found.source,
        "remark": "",
    }


def predicted_peak(record: Record) -> int | None:
    """Bytes predicted for the device that a run was measured on; None where that cannot be predicted."""
    card = of_device(record.device_name, record.device_bytes) if record.device_kind == "cuda" else None
    name = card.name if card else CPU if record.device_kind == CPU else None
    with suppress(WorkbenchError):
        return predict(Recipe.from_dict(record.recipe), name).peak_allocated_bytes if name else None
    return None


def style_predictions(table: pd.DataFrame) -> "Styler":
    """The table as people read it; all text is escaped."""
    gpu = table.attrs["gpu"]
    shown = pd.DataFrame(
        {
            "measured here": [_shown(number) for number in table["measured_bytes"]],
            f"predicted for {gpu}": [_shown(number) for number in table["predicted_bytes"]],
            "what sets the peak there": [_moment(row) for _, row in table.iterrows()],
        },
        index=table.index.rename(None),
    )
    title = GPUS[gpu].title if gpu in GPUS else gpu
    sources = ", ".join(sorted(set(table["memory_source"]) - {""}))
    styler = shown.style.format(escape="html").format_index(escape="html", axis=0)
    made = table["prediction_source"].dropna() if "prediction_source" in table else ()
    engines = "".join(f", by {words}" for words in sorted({engine_words(source) for source in made}))
    return styler.set_caption(f"Measured: {sources}. Predicted, not measured: {title}{engines}.")


def _shown(number: Any) -> str:
    return "–" if pd.isna(number) else format_bytes(int(number))


def _moment(row: "pd.Series[Any]") -> str:
    """Phase, operation, and the category that most of the peak is made of."""
    if row["remark"]:
        return str(row["remark"])
    operation = str(row["peak_operation"]).split(" in ")[0].removeprefix("aten.")
    return f"{row['largest'].replace('_', ' ')}; in the {row['peak_phase'].replace('_', ' ')}, at {operation}"
