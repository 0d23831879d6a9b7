"""Predictions beside measurements: what was predicted for the device that a run was measured on."""

from contextlib import suppress

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import of_device
from workbench.predict.predict import CPU, predict
from workbench.records.record import Record


def predicted_peak(record: Record) -> int | None:
    """Bytes predicted for the device that a run was measured on; None where that cannot be predicted."""
    card = of_device(record.device_name, record.device_bytes) if record.device_kind == "cuda" else None
    if card is None and record.device_kind != CPU:
        return None
    with suppress(WorkbenchError):
        return predict(record.recipe, card.name if card else CPU).peak_allocated_bytes
    return None
