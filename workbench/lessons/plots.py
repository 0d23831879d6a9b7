"""Records as pictures. Backgrounds are transparent and text is grey, so that they read on light and dark pages."""

import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.advise.compare import WITHOUT_VALUES, pareto
from workbench.measure.categories import Category, Phase, format_bytes
from workbench.measure.emulated import emulated
from workbench.measure.timeline import Timeline
from workbench.paths import beside
from workbench.predict.phases import Life, life_table
from workbench.records.record import Record

MIB = 2**20
NO_VALUES = emulated() and WITHOUT_VALUES  # what a lesson says in place of a value; empty on every other device
_PALETTE = beside(__file__, "plots.toml")
GREY, LINES = _PALETTE["grey"], _PALETTE["lines"]
COLOURS: dict[Category, str] = {Category(name): colour for name, colour in _PALETTE["categories"].items()}


class Picture(Figure):
    """A figure that a notebook shows by itself: pyplot, which usually sees to that, must not be used in threads."""

    def _repr_png_(self) -> bytes:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=100)
        return data.getvalue()


def memory_bars(frame: pd.DataFrame, limit_bytes: int | None = None) -> Picture:
    """The peak of each recipe by category, from a comparison or from `records()` (there, the last run of a label).

    `limit_bytes`, a budget or a cap, is drawn as a line.
    """
    rows = frame.reset_index().drop_duplicates("label", keep="last").set_index("label")
    peaks = rows["peak_allocated_bytes"].astype(float) / MIB
    figure, axes = _axes(8.0, 0.9 + 0.5 * len(rows))
    left = np.zeros(len(rows))
    for category in Category:
        sizes = rows[f"{category}_bytes"].fillna(0).to_numpy(dtype=float) / MIB
        if sizes.max() > 0.002 * peaks.max():
            axes.barh(list(rows.index), sizes, left=left, color=COLOURS[category], label=_words(category), height=0.65)
            left += sizes
    for row, peak in enumerate(peaks):
        axes.text(peak, row, f" {format_bytes(peak * MIB)}", va="center", color=GREY)
    if limit_bytes is not None:
        words = f"limit {format_bytes(limit_bytes)}"
        axes.axvline(limit_bytes / MIB, color=GREY, linestyle="--", zorder=0, label=words)
    axes.invert_yaxis()
    sources = ", ".join(sorted(set(rows["memory_source"])))
    axes.set(xlim=(0, peaks.max() * 1.16), xlabel=f"bytes at the peak, MiB ({sources})")
    return _finish(figure, axes, columns=4)


def loss_curves(records: Sequence[Record]) -> Picture:
    """Training loss over steps, or over tokens where the runs took different numbers of steps: the mean over seeds as
    a line, their range as a band."""
    figure, axes = _axes(8.0, 3.4)
    if not any(record.losses for record in records):
        return _say_none(figure, axes, "losses", {record.memory_source for record in records})
    alike = len({len(record.losses) for record in records}) == 1
    labels = list(dict.fromkeys(record.label for record in records))
    for index, label in enumerate(labels):
        ones = [record for record in records if record.label == label]
        runs, colour = np.array([record.losses for record in ones]), LINES[index % len(LINES)]
        steps = np.arange(1, runs.shape[1] + 1) * (1 if alike else ones[0].tokens_seen / runs.shape[1])
        axes.plot(steps, runs.mean(axis=0), color=colour, label=label, linestyle=("-", "--", ":", "-.")[index % 4])
        axes.fill_between(steps, runs.min(axis=0), runs.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    axes.set(xlabel="step (one optimizer update)" if alike else "tokens seen", ylabel="training loss")
    return _finish(figure, axes, columns=3)


def timeline(history: Timeline, start: int = 0, stop: int | None = None) -> Picture:
    """Live bytes after every event, stacked by category, with the phases named."""
    live = history.live[:, start:stop] / MIB
    events = np.arange(start, start + live.shape[1])
    figure, axes = _axes(8.5, 3.8)
    shown = {category: row for category, row in zip(Category, live, strict=True) if row.any()}
    colours, words = [COLOURS[category] for category in shown], [_words(category) for category in shown]
    axes.stackplot(events, list(shown.values()), colors=colours, labels=words, step="post", linewidth=0)
    _name_phases(axes, history.phases[start:stop], start, float(live.sum(axis=0).max()))
    axes.set(xlabel="event (a tensor comes or goes)", ylabel="live bytes, MiB")
    return _finish(figure, axes, columns=4)


def life_bars(*lives: Life) -> Figure:
    """Of each phase of a run the bytes on the device and on the host; a line where the device ends."""
    table = life_table(*lives).drop(columns="ratio", level=0, errors="ignore").iloc[::-1, ::-1] / 2**30
    table.columns = [f"{source} {_words(name.removesuffix('_bytes'))}" for source, name in table.columns]
    figure, axes = _axes(8.0, 6.0)
    most = 1.1 * table.max(axis=None)
    table.plot.barh(ax=axes, width=0.8, color=LINES, xlabel="GiB", ylabel="", xlim=(0, most), legend=False)
    for life in lives:
        axes.axvline(((life.capacity_bytes or 0) - life.context_bytes) / 2**30, color=GREY, linestyle="--")
    return _finish(figure, axes, columns=3)


def _name_phases(axes: Axes, phases: Sequence[Phase | None], start: int, height: float) -> None:
    for phase, some in groupby(phases):
        events = len(list(some))
        if phase is not None and events > len(phases) / 60:
            axes.axvline(start, color=GREY, linewidth=0.8, linestyle=":")
            axes.text(start + events / 2, height * 1.04, _words(phase), ha="center", color=GREY, fontsize=9)
        start += events
    axes.set_ylim(0, height * 1.14)


def tradeoffs(table: pd.DataFrame) -> Picture:
    """Memory against speed, the loss as the colour, of what was timed; those on the Pareto front have a ring."""
    timed = table.dropna(subset=["speed_ratio"])
    figure, axes = _axes(10.0, max(4.2, 0.27 * len(timed) + 1.6))
    if timed.empty:
        return _say_none(figure, axes, "speed", set(table["memory_source"]))
    peaks, speeds = timed["peak_allocated_bytes"] / MIB, timed["speed_ratio"]
    points = axes.scatter(peaks, speeds, c=timed["held_out_loss"], cmap="viridis_r", s=90, zorder=3)
    front = timed.index.isin(pareto(table))
    axes.scatter(peaks[front], speeds[front], s=230, facecolors="none", edgecolors=GREY, linewidths=1.4, zorder=2)
    _name_beside(axes, peaks, speeds)
    axes.margins(0.08)
    axes.set(xlabel="peak memory, MiB (left is better)", ylabel="speed, the baseline's is 1 (up is better)")
    bar = figure.colorbar(points, ax=axes, location="bottom", aspect=50, label="held-out loss (yellow is better)")
    bar.ax.tick_params(colors=GREY)
    bar.ax.xaxis.label.set_color(GREY)
    bar.outline.set_visible(False)
    return _finish(figure, axes, columns=0)


def _name_beside(axes: Axes, x: pd.Series, y: pd.Series) -> None:
    """The names in a column to the right, each with a line to its point: many points are close to each other."""
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkB": 5}
    style: dict[str, Any] = {"va": "center", "fontsize": 9, "color": GREY, "arrowprops": line}
    for place, label in enumerate(y.sort_values().index):
        beside = (1.05, (place + 0.5) / len(y))
        axes.annotate(str(label), (x[label], y[label]), xytext=beside, textcoords="axes fraction", **style)


def _say_none(figure: Picture, axes: Axes, what: str, sources: set[str]) -> Picture:
    """In place of a picture: there is nothing to draw, and why."""
    why = f": {WITHOUT_VALUES}" if any(source.startswith("emulated") for source in sources) else ""
    axes.text(0.5, 0.5, f"no {what} on record{why}", transform=axes.transAxes, ha="center", color=GREY)
    figure.set_size_inches(8.0, 1.2)
    axes.set_axis_off()
    return figure


def _words(name: str) -> str:
    return name.replace("_", " ")


def _axes(width: float, height: float) -> tuple[Picture, Axes]:
    figure = Picture(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.subplots(subplot_kw={"facecolor": "none"})
    axes.tick_params(colors=GREY)
    axes.spines[:].set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(GREY)
    return figure, axes


def _finish(figure: Picture, axes: Axes, columns: int) -> Picture:
    if columns:
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=GREY, fontsize=9)
        legend.set_zorder(5)
    return figure
