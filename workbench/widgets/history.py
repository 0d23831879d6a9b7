"""The runs on record: a table, and those that are picked as overlaid curves, bars and texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import ipywidgets as w

from workbench.advise.frame import to_frame
from workbench.base.categories import format_bytes
from workbench.journal.record import Record, read_all
from workbench.journal.store import mark_killed
from workbench.lessons import plots
from workbench.prediction.predict import predicted_peak
from workbench.widgets.light import HTML, VBox
from workbench.widgets.pages import begun, page, picture
from workbench.widgets.part import Background

SHOWN = 50


class History(Background):
    """Runs of this and of earlier kernels, the newest first, each with its prediction for the device it ran on."""

    quiet_s = 0.3

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.table = HTML()
        self.choice = w.SelectMultiple(description="compare", rows=8, _dom_classes=("wb-wide",))
        self.page = HTML("<p>Pick one run or several above (Ctrl or Shift for more).</p>")
        self.view = VBox([self.table, self.choice, self.page])
        self.choice.observe(self._show_picked, names="value")
        self.predicted: dict[str, int | None] = {}  # by the record's id
        self.refresh()

    def show(self, *_: object) -> None:
        """It is looked at: read the folder again, and predict what has no prediction yet."""
        self.refresh()
        self.ask([record for record in self._records if record.id not in self.predicted])

    def refresh(self) -> None:
        """Read the folder again; what was picked stays picked."""
        mark_killed(self.folder)
        self._records = read_all(self.folder)[-SHOWN:][::-1]
        picked = self._picked()
        self.choice.options = [(name_of(record), record.id) for record in self._records]
        self.choice.value = tuple(record.id for record in picked)
        self.put()

    def answers(self, records: list[Record]) -> Iterator[None]:
        for record in records:
            self.predicted[record.id] = predicted_peak(record) if record.peak_allocated_bytes else None
            yield None

    def put(self, _: None = None) -> None:
        self.table.value = page("history", records=self._records, predicted=self.predicted)

    def _picked(self) -> list[Record]:
        return [record for record in self._records if record.id in self.choice.value]

    def _show_picked(self, _: object) -> None:
        picked = self._picked()
        self.page.value = overlay(picked) if picked else "<p>Nothing is picked.</p>"


def name_of(record: Record) -> str:
    return f"{begun(record)} · {record.label} · {record.model} · {record.status}"


def overlay(records: Sequence[Record]) -> str:
    """Curves, bars and texts of several runs; each keeps a name of its own, though their labels may be equal."""
    named = [replace(record, label=f"{number}: {record.label}") for number, record in enumerate(records, 1)]
    measured = [record for record in named if record.peak_allocated_bytes]
    bars = ""
    if measured:
        peaks = [f"{record.label} {format_bytes(record.peak_allocated_bytes or 0)}" for record in measured]
        bars = picture(plots.memory_bars(to_frame(measured)), f"Peak memory: {'; '.join(peaks)}")
    return page("overlay", curves=loss_picture(named), bars=bars, records=named)


def loss_picture(records: Sequence[Record]) -> str:
    """The training losses as curves, with a text that says where each begins and ends; empty if there are none."""
    trained = [record for record in records if record.losses]
    if not trained:
        return ""
    ranges = [f"{record.label} from {record.losses[0]:.3f} to {record.losses[-1]:.3f}" for record in trained]
    return picture(plots.loss_curves(trained), f"Training loss: {'; '.join(ranges)}")
