"""The runs on record: a table, and those that are picked as overlaid curves, bars and texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ipywidgets as w

from workbench.lessons import plots
from workbench.measure.categories import format_bytes
from workbench.records.frame import to_frame
from workbench.records.record import Record, Status, read_all
from workbench.records.store import mark_killed
from workbench.widgets.pages import escaped, picture

SHOWN = 30
COLUMNS = [
    "created_at", "status", "label", "model", "steps_done", "peak_allocated_bytes", "held_out_loss", "tokens_per_s",
]  # fmt: skip


class History:
    """Runs of this and of earlier kernels, the newest first."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.table = w.HTML()
        self.choice = w.SelectMultiple(description="compare", rows=8, layout=w.Layout(width="100%"))
        self.page = w.HTML("<p>Pick one run or several above (Ctrl or Shift for more).</p>")
        self.view = w.VBox([self.table, self.choice, self.page])
        self.choice.observe(lambda _: self._show(), names="value")
        self.refresh()

    def refresh(self) -> None:
        """Read the folder again; what was picked stays picked."""
        mark_killed(self.folder)
        self._records = list(reversed(read_all(self.folder)[-SHOWN:]))
        picked = self.choice.value
        self.choice.options = [(name_of(record), record.id) for record in self._records]
        self.choice.value = tuple(one for one in picked if one in {record.id for record in self._records})
        self.table.value = table_of(self._records)

    def _show(self) -> None:
        picked = [record for record in self._records if record.id in self.choice.value]
        self.page.value = overlay(picked) if picked else "<p>Nothing is picked.</p>"


def name_of(record: Record) -> str:
    return f"{record.created_at[5:16].replace('T', ' ')} · {record.label} · {record.status}"


def table_of(records: Sequence[Record]) -> str:
    """All cells escaped: names may come from anywhere."""
    if not records:
        return "<p>No runs yet.</p>"
    frame = to_frame(list(records))[COLUMNS].rename(columns={"peak_allocated_bytes": "peak"})
    frame["created_at"] = frame["created_at"].dt.strftime("%m-%d %H:%M")
    formats = {"peak": format_bytes, "held_out_loss": "{:.3f}", "tokens_per_s": "{:,.0f}"}
    styler = frame.style.format(formats, escape="html", na_rep="").hide(axis="index")
    return str(styler.relabel_index([c.replace("_", " ") for c in frame.columns], axis="columns").to_html())


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
