"""The picture of the fastest recipe that fits, for every size of card."""

import textwrap
from collections.abc import Sequence
from functools import partial

import pandas as pd

from workbench.advise.candidate import worst_numerics
from workbench.gpus.catalogue import GIB
from workbench.lessons.plots import GREY, LINES, Picture, name_beside, new_axes, say_none, with_legend
from workbench.techniques import REGISTRY, Numerics
from workbench.techniques.registry import in_words

STAIRS = {
    "same loss": (Numerics.EXACT,),
    "fewer digits, or the same loss": (Numerics.EXACT, Numerics.APPROXIMATE),
}
CARDS_GIB = (8, 12, 16, 24)


def steps_of(table: pd.DataFrame, allowed: Sequence[Numerics]) -> pd.DataFrame:
    """Return the rows of the recipes that are faster than all that need no more memory, the smallest first.

    Args:
        table: the table of `compare`, or a committed one: by label, with `peak_allocated_bytes`, `speed_ratio`,
            `techniques`. A recipe without a speed is on no stairs and takes none off.
        allowed: the changes of the loss that the techniques of a recipe may make.
    """
    timed = table[table["techniques"].map(numerics_of).isin(allowed)].dropna(subset=["speed_ratio"])
    timed = timed.sort_values(["peak_allocated_bytes", "speed_ratio"], ascending=[True, False])
    fastest_before = timed["speed_ratio"].cummax().shift(fill_value=0.0)
    return timed[timed["speed_ratio"] > fastest_before]


def numerics_of(techniques: str) -> Numerics:
    """Return what techniques such as `"lora+padding"` do to the loss: that of the one that changes it most."""
    return worst_numerics(filter(None, map(REGISTRY.get, techniques.split("+"))))


def draw_staircase(table: pd.DataFrame) -> Picture:
    """Draw speed over peak as two staircases, and lines at sizes of cards: take the highest step left of your line."""
    figure, axes = new_axes(10.0, 4.6)
    named = table.rename(index=in_words)
    flights = [steps_of(named, allowed) for allowed in STAIRS.values()]
    steps = pd.concat(flights)
    if steps.empty:
        return say_none(figure, axes, "speed that was timed twice", table["memory_source"])
    smallest_gib = steps["peak_allocated_bytes"].min() / GIB
    right_gib = 1.6 * max(CARDS_GIB)
    places = []
    for name, flight, colour in zip(STAIRS, flights, LINES, strict=False):
        peaks_gib = flight["peak_allocated_bytes"] / GIB
        speeds = flight["speed_ratio"]
        axes.plot(peaks_gib, speeds, "o", color=colour)
        for label, peak_gib in peaks_gib.items():
            places.append(f"{label} ({name}), {peak_gib:.1f} GiB, {speeds[label]:.2f}×")
        # the last step goes on for as much memory as there is
        to_the_right = [*peaks_gib, right_gib]
        axes.plot(to_the_right, [*speeds, speeds.max()], drawstyle="steps-post", color=colour, label=name, linewidth=2)
    for size_gib in CARDS_GIB:
        axes.axvline(size_gib, color=GREY, linestyle="--", linewidth=0.8, zorder=0)
        axes.annotate(f"{size_gib:g} GB", (size_gib, 1.0), xycoords=("data", "axes fraction"), color=GREY, fontsize=9)
    once = steps[~steps.index.duplicated()].rename(index=partial(textwrap.fill, width=48))
    name_beside(axes, once["peak_allocated_bytes"] / GIB, once["speed_ratio"])
    axes.set_xscale("log", base=2)
    ticks = [tick for tick in (0.125, 0.25, 0.5, 1, 2, 4, *CARDS_GIB) if tick > smallest_gib / 2]
    axes.set_xticks(ticks, map("{:g}".format, ticks))
    axes.set(xlim=(ticks[0], right_gib), ylim=(0, None))
    axes.set(xlabel="peak memory, GiB (left is better)", ylabel="speed, the baseline's is 1 (up is better)")
    figure.description = f"Two staircases of speed over peak memory: {'; '.join(places)}."
    return with_legend(figure, columns=2)
