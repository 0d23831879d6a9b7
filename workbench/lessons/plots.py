"""Records as pictures. Backgrounds are transparent and text is grey, so that they read on light and dark pages."""

import base64
import html
import io
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbench.advise.compare import BY_CATEGORY, WITHOUT_VALUES
from workbench.base.categories import Category, format_bytes
from workbench.gpus.catalogue import MIB
from workbench.techniques.registry import in_words

# These colours are told apart with every kind of colour vision (Okabe and Ito, "Color Universal Design", 2008).
LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"]
DASHES = ["-", "--", ":", "-."]
GREY = "#808080"
COLOURS: dict[str, str] = {
    Category.WEIGHTS: "#0072B2",
    Category.GRADIENTS: "#56B4E9",
    Category.OPTIMIZER_STATES: "#009E73",
    Category.ACTIVATIONS: "#E69F00",
    Category.LOGITS_AND_LOSS: "#D55E00",
    Category.TEMPORARIES: "#CC79A7",
    Category.UNATTRIBUTED: "#999999",
}
# the colour of letters on these: black or white, whichever has a contrast of 4.5 to 1 at least (WCAG 2.2, 1.4.3)
INKS = dict.fromkeys(COLOURS, "#000") | {Category.WEIGHTS: "#fff"}


class Picture(Figure):
    """A figure that a notebook shows without pyplot, which must not be used in threads.

    Attributes:
        description: the text of a screen reader, which says what can be seen.
    """

    description = ""

    def _repr_html_(self) -> str:
        data = io.BytesIO()
        self.savefig(data, format="png", dpi=100)
        source = base64.b64encode(data.getvalue()).decode()
        description = html.escape(self.description)
        return f'<img alt="{description}" style="max-width: 100%" src="data:image/png;base64,{source}">'


def memory_bars(frame: pd.DataFrame, limit_bytes: int | None = None) -> Picture:
    """Draw the peak of each recipe by category, from a comparison or from `records()` (there, the last run of a label).

    Args:
        limit_bytes: a budget or a cap, drawn as a line.
    """
    rows = frame.reset_index().drop_duplicates("label", keep="last").set_index("label").rename(index=in_words)
    peaks = rows["peak_allocated_bytes"].astype(float) / MIB
    sizes = rows[BY_CATEGORY].fillna(0).astype(float) / MIB
    sizes = sizes.set_axis(list(Category), axis="columns")
    # a category below 0.2 % of the longest bar is hardly a pixel wide: it has no place in the legend
    sizes = sizes.loc[:, sizes.max() > 0.002 * peaks.max()]
    figure, axes = new_axes(8.0, 0.9 + 0.5 * len(rows))
    colours = list(sizes.columns.map(COLOURS))
    sizes.columns = sizes.columns.str.replace("_", " ")
    sizes.plot.barh(ax=axes, stacked=True, color=colours, width=0.65, legend=False)
    bars_in_words = []
    for row, (label, peak) in enumerate(peaks.items()):
        axes.text(peak, row, f" {format_bytes(peak * MIB)}", va="center", color=GREY)
        bars_in_words.append(f"{label} {format_bytes(peak * MIB)}, most of it {sizes.loc[label].idxmax()}")
    if limit_bytes is not None:
        label = f"limit {format_bytes(limit_bytes)}"
        axes.axvline(limit_bytes / MIB, color=GREY, linestyle="--", zorder=0, label=label)
    sources = ", ".join(sorted(set(rows["memory_source"])))
    axes.set(xlim=(0, 1.16 * peaks.max()), xlabel=f"bytes at the peak, MiB ({sources})", ylabel="")
    axes.invert_yaxis()
    figure.description = f"Bars of the peak by category: {'; '.join(bars_in_words)}."
    return with_legend(figure, columns=4)


def loss_curves(records: Iterable[Any]) -> Picture:
    """Draw training losses over steps; of records with one label, the mean as a line and the range as a band."""
    figure, axes = new_axes(8.0, 3.4)
    losses_of: dict[str, list[list[float]]] = {}
    sources = []
    ends = []
    for record in records:
        sources.append(record.memory_source)
        if record.losses:
            label = in_words(record.label)
            losses_of.setdefault(label, []).append(record.losses)
            ends.append(f"{label} from {record.losses[0]:.2f} to {record.losses[-1]:.2f}")
    if not ends:
        return say_none(figure, axes, "losses", sources)
    for label, runs in losses_of.items():
        losses = np.array(runs)
        steps = np.arange(1, losses.shape[1] + 1)
        (line,) = axes.plot(steps, losses.mean(axis=0), label=label)
        lowest = losses.min(axis=0)
        highest = losses.max(axis=0)
        axes.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.18, linewidth=0)
    figure.description = f"Curves of the training loss: {'; '.join(ends)}."
    axes.set(xlabel="step (one optimizer update)", ylabel="training loss")
    return with_legend(figure, columns=3)


def name_beside(axes: Axes, x: pd.Series, y: pd.Series) -> None:
    """Write the names in a column to the right, each with a line to its point: many points are close to each other."""
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkB": 5}
    for row, label in enumerate(y.sort_values().index):
        axes.annotate(
            str(label),
            (x[label], y[label]),
            xytext=(1.05, (row + 0.5) / len(y)),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=9,
            color=GREY,
            arrowprops=line,
        )


def say_none(figure: Picture, axes: Axes, what: str, sources: Iterable[str]) -> Picture:
    """Write, in place of a picture, that there is nothing to draw, and why. Returns the figure."""
    text = f"no {what} on record"
    if "emulated" in " ".join(sources):
        text += f": {WITHOUT_VALUES}"
    figure.description = text
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=GREY)
    axes.set_axis_off()
    figure.set_size_inches(8.0, 1.2)
    return figure


def new_axes(width: float, height: float) -> tuple[Picture, Axes]:
    figure = Picture(figsize=(width, height), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.set_prop_cycle(color=4 * LINES, linestyle=7 * DASHES)
    axes.tick_params(colors=GREY)
    axes.spines[:].set_color(GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.label.set_color(GREY)
    axes.yaxis.label.set_color(GREY)
    return figure, axes


def with_legend(figure: Picture, columns: int) -> Picture:
    legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=GREY, fontsize=9)
    legend.set_zorder(5)
    return figure
