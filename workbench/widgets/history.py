"""The runs on record: a table, and those that are picked as overlaid curves, bars and texts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import ipywidgets as w

from workbench.lessons import plots
from workbench.measure.categories import format_bytes
from workbench.predict.beside import predicted_peak
from workbench.records.frame import to_frame
from workbench.records.record import Record, Status, read_all
from workbench.records.store import mark_killed
from workbench.widgets.background import Newest
from workbench.widgets.pages import escaped, picture

SHOWN = 50
COLUMNS = [
    "status", "label", "model", "batch", "length", "cap", "steps_done", "predicted", "peak_allocated_bytes",
    "held_out_loss", "tokens_per_s",
]  # fmt: skip
SCROLLING = "overflow-x: auto; max-height: 20em"


class History:
    """Runs of this and of earlier kernels, the newest first, each with its prediction for the device it ran on."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.table = w.HTML()
        self.choice = w.SelectMultiple(description="compare", rows=8, layout=w.Layout(width="100%"))
        self.page = w.HTML("<p>Pick one run or several above (Ctrl or Shift for more).</p>")
        self.view = w.VBox([self.table, self.choice, self.page])
        self.choice.observe(lambda _: self._show(), names="value")
        self.predicted: dict[str, int | None] = {}
        self._newest = Newest(self._predictions, self._tabulate, quiet_s=0.3)
        self.refresh()

    def show(self) -> None:
        """It is looked at: read the folder again, and predict what has no prediction yet."""
        self.refresh()
        self._newest.ask([record for record in self._records if record.id not in self.predicted])

    def refresh(self) -> None:
        """Read the folder again; what was picked stays picked."""
        mark_killed(self.folder)
        self._records = list(reversed(read_all(self.folder)[-SHOWN:]))
        picked = self.choice.value
        self.choice.options = [(name_of(record), record.id) for record in self._records]
        self.choice.value = tuple(one for one in picked if one in {record.id for record in self._records})
        self._tabulate(None)

    def _tabulate(self, _: None) -> None:
        self.table.value = table_of(self._records, self.predicted)

    def _predictions(self, records: list[Record]) -> Iterator[None]:
        for record in records:
            self.predicted[record.id] = predicted_peak(record) if record.peak_allocated_bytes else None
            yield

    def _show(self) -> None:
        picked = [record for record in self._records if record.id in self.choice.value]
        self.page.value = overlay(picked) if picked else "<p>Nothing is picked.</p>"


def begun(record: Record) -> str:
    """When, in this machine's time zone."""
    return f"{datetime.fromisoformat(record.created_at).astimezone():%d %b %H:%M}"


def name_of(record: Record) -> str:
    return f"{begun(record)} · {record.label} · {record.model} · {record.status}"


def table_of(records: Sequence[Record], predicted: Mapping[str, int | None]) -> str:
    """All cells escaped: names may come from anywhere."""
    if not records:
        return "<p>No runs yet.</p>"
    recipes = [record.recipe for record in records]
    frame = to_frame(list(records)).assign(
        begun=[begun(record) for record in records],
        batch=[recipe["effective_batch_size"] for recipe in recipes],
        length=[recipe["sequence_length"] for recipe in recipes],
        cap=[record.memory_cap_bytes for record in records],
        predicted=[predicted.get(record.id) for record in records],
    )
    shown = frame[["begun", *COLUMNS]].rename(columns={"peak_allocated_bytes": "measured", "steps_done": "steps"})
    formats = {
        "cap": _size,
        "predicted": _size,
        "measured": _size,
        "held_out_loss": "{:.3f}",
        "tokens_per_s": "{:,.0f}",
    }
    styler = shown.style.format(formats, escape="html", na_rep="").hide(axis="index")
    page = styler.relabel_index([c.replace("_", " ") for c in shown.columns], axis="columns").to_html()
    return f'<div style="{SCROLLING}">{page}</div>'


def _size(number: float) -> str:
    return format_bytes(number) if number == number else ""


def overlay(records: Sequence[Record]) -> str:
    """Curves, bars and texts of several runs; each keeps a name of its own, though their labels may be equal."""
    named = [replace(record, label=f"{number}: {record.label}") for number, record in enumerate(records, 1)]
    trained = [record for record in named if record.losses]
    measured = [record for record in named if record.peak_allocated_bytes]
    parts = [picture(plots.loss_curves(trained), _losses(trained))] if trained else []
    parts += [picture(plots.memory_bars(to_frame(measured)), _peaks(measured))] if measured else []
    parts += [_failed(record) for record in named if record.status is not Status.OK]
    parts += [texts(record) for record in named if record.text_after]
    return "".join(parts)


def texts(record: Record) -> str:
    """Generated before and after, side by side; one below the other where the page is narrow."""
    boxes = "".join(
        f'<div style="flex: 1 1 20em"><b>{when}</b><p style="white-space: pre-wrap">{escaped(text)}</p></div>'
        for when, text in (("before", record.text_before), ("after", record.text_after))
    )
    return f'<p><b>{escaped(record.label)}</b></p><div style="display: flex; flex-wrap: wrap; gap: 1.5em">{boxes}</div>'


def _failed(record: Record) -> str:
    return f"<p>{escaped(record.label)}: {escaped(record.status)}. {escaped(record.error)}</p>"


def _losses(records: Sequence[Record]) -> str:
    return "Training loss: " + "; ".join(f"{r.label} from {r.losses[0]:.3f} to {r.losses[-1]:.3f}" for r in records)


def _peaks(records: Sequence[Record]) -> str:
    return "Peak memory: " + "; ".join(f"{r.label} {format_bytes(r.peak_allocated_bytes or 0)}" for r in records)
