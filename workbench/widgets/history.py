"""The runs on record: a table, and those that are picked as overlaid curves, bars and texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ipywidgets as w

from workbench.advise.frame import to_frame
from workbench.lessons import plots
from workbench.measure.categories import format_bytes
from workbench.predict.beside import predicted_peak
from workbench.records.record import Record, read_all
from workbench.records.store import mark_killed
from workbench.widgets.background import Newest
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import begun, page, picture

SHOWN = 50


class History:
    """Runs of this and of earlier kernels, the newest first, each with its prediction for the device it ran on."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.table = HTML()
        self.choice = w.SelectMultiple(description="compare", rows=8, layout=w.Layout(width="auto"))
        self.page = HTML("<p>Pick one run or several above (Ctrl or Shift for more).</p>")
        self.view = VBox([self.table, self.choice, self.page])
        self.choice.observe(lambda _: self._show(), names="value")
        self.predicted: dict[str, int | None] = {}
        self.newest = Newest(self._predictions, self._tabulate, quiet_s=0.3)
        self.refresh()

    def show(self) -> None:
        """It is looked at: read the folder again, and predict what has no prediction yet."""
        self.refresh()
        self.newest.ask([record for record in self._records if record.id not in self.predicted])

    def refresh(self) -> None:
        """Read the folder again; what was picked stays picked."""
        mark_killed(self.folder)
        self._records = list(reversed(read_all(self.folder)[-SHOWN:]))
        picked = self.choice.value
        self.choice.options = [(name_of(record), record.id) for record in self._records]
        self.choice.value = tuple(one for one in picked if one in {record.id for record in self._records})
        self._tabulate(None)

    def _tabulate(self, _: None) -> None:
        self.table.value = page("history", records=self._records, predicted=self.predicted)

    def _predictions(self, records: list[Record]) -> Iterator[None]:
        for record in records:
            self.predicted[record.id] = predicted_peak(record) if record.peak_allocated_bytes else None
            yield

    def _show(self) -> None:
        picked = [record for record in self._records if record.id in self.choice.value]
        self.page.value = overlay(picked) if picked else "<p>Nothing is picked.</p>"


def name_of(record: Record) -> str:
    return f"{begun(record)} · {record.label} · {record.model} · {record.status}"


def overlay(records: Sequence[Record]) -> str:
    """Curves, bars and texts of several runs; each keeps a name of its own, though their labels may be equal."""
    named = [replace(record, label=f"{number}: {record.label}") for number, record in enumerate(records, 1)]
    trained = [record for record in named if record.losses]
    measured = [record for record in named if record.peak_allocated_bytes]
    curves = picture(plots.loss_curves(trained), loss_words(trained)) if trained else ""
    bars = picture(plots.memory_bars(to_frame(measured)), _peaks(measured)) if measured else ""
    return page("overlay", curves=curves, bars=bars, records=named)


def loss_words(records: Sequence[Record]) -> str:
    return "Training loss: " + "; ".join(f"{r.label} from {r.losses[0]:.3f} to {r.losses[-1]:.3f}" for r in records)


def _peaks(records: Sequence[Record]) -> str:
    return "Peak memory: " + "; ".join(f"{r.label} {format_bytes(r.peak_allocated_bytes or 0)}" for r in records)
