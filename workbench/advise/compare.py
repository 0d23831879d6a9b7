"""Records side by side: what each recipe saves against the baseline, what it costs, and which ones are worth it.

Only runs that compare are put into one table: same model, text, batch, length, steps, dropout, world (device, threads,
number of ranks) and source of the memory figures, and without a memory cap, under which speed may be unknown. Several
seeds of a recipe become one row; loss differences inside the seed-to-seed spread are ties, and a verdict on them needs
learning rates that were searched (`workbench.advise.fair`). Speeds are compared run by run, each with the baseline's
run beside it in time, and not where other programs took processors from one of them.
"""

import html
import json
from typing import Any

import numpy as np
import pandas as pd

from workbench.base.categories import Category, format_bytes
from workbench.base.errors import ConfigurationError
from workbench.base.result import Result
from workbench.journal.record import Status
from workbench.techniques import REGISTRY

IN_WORDS = ["model", "corpus", "effective_batch_size", "sequence_length", "steps", "dropout", "memory_source"]
SAME = [*IN_WORDS, "arguments", "data_sha256", "device_kind", "device_name", "threads", "world_size", "shard"]
IN_COMMON = [*IN_WORDS, "arguments", "device", "world_size", "shard"]
BASELINE = "baseline"
MEASURED = ["peak_allocated_bytes", "trainable_parameters", "learning_rate"]
WITHOUT_VALUES = "an emulated GPU computes no values"
MAXIMA = [f"{category}_maximum_bytes" for category in Category]
BY_CATEGORY = [*(f"{category}_bytes" for category in Category), *MAXIMA]
ELSEWHERE = {"peak_host_bytes": "in host memory", "peak_disk_bytes": "on disk"}  # what was moved out of the device

DISTURBED = 0.1  # of the processors' time, taken by others: 0.03 on two quiet cores, 0.34 beside one busy process
BESIDE_S = 120.0  # between the beginnings of two runs that are timed beside each other; or twice the time of the steps
EQUAL = 0.02  # of speed: a loss as small as that is none

# of the seed with the largest peak
KEPT = [*MEASURED, "tokens_seen", "techniques", "peak_phase", "memory_source", *BY_CATEGORY, *ELSEWHERE]


def compare(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a recipe, from a frame of `records()`, the best bargain first.

    First what saves memory and takes no time, the largest saving first; then what takes time, by the bytes saved per
    second lost; then what takes an unknown time; then the baseline; then what saves nothing.

    Of several comparable groups, the one with the newest run is taken, of those with a baseline. Of several runs
    with one seed, the newest counts; of several learning rates, the one that was searched. Columns:
    `peak_allocated_bytes`, `saved_bytes`, `saved_fraction`, `held_out_loss` (mean over seeds), `held_out_loss_spread`
    (largest minus smallest; missing with one seed), `loss_difference`, `loss_verdict`, `rate_searched`, `tokens_per_s`
    (median), `speed_ratio` (median over the runs, each against the baseline's run with its seed that is nearest in
    time), `slowest` and `fastest` of these ratios, `pairs` (how many they are), `timing` (why there are none:
    `disturbed`, `apart`), `lost_s` (more seconds than the baseline for the tokens of the run; zero where the slowest
    loses next to nothing; missing with one pair, and where the pairs disagree), `saved_bytes_per_lost_s` (infinite
    where it takes no time), `without_effect` (categories that its techniques attack, if none of them shrank),
    `trainable_parameters`, `learning_rate`, `seeds`, `peak_phase`, `memory_source`, the bytes of each category at the
    peak, and those of `peak_host_bytes` and `peak_disk_bytes`, missing where nothing was moved out of the device. What
    the rows have in common is in `.attrs`.

    Raises:
        ConfigurationError: no finished run, or none of them without techniques.
    """
    group = _newest_group(frame)
    runs = group.sort_values("created_at").drop_duplicates(["label", "learning_rate", "seed"], keep="last")
    speeds = _beside(runs, group[group["label"] == BASELINE])
    table = _summary(runs).join(speeds).fillna({"pairs": 0, "timing": ""})
    base = table.loc[BASELINE]
    table["saved_bytes"] = base["peak_allocated_bytes"] - table["peak_allocated_bytes"]
    table["saved_fraction"] = table["saved_bytes"] / base["peak_allocated_bytes"]
    table["loss_difference"] = table["held_out_loss"] - base["held_out_loss"]
    table["loss_verdict"] = table.apply(verdict, axis=1, base=base)
    table["lost_s"] = table.apply(_lost, axis=1)
    table["saved_bytes_per_lost_s"] = table.apply(_rate, axis=1)
    table["without_effect"] = table.apply(_without_effect, axis=1, base=base)
    rows = sorted((row for _, row in table.iterrows()), key=_bargain)
    table = table.loc[[row.name for row in rows]].drop(columns=MAXIMA)
    newest = group.iloc[-1]
    table.attrs = {name: str(newest[name]) for name in IN_COMMON}
    return table


def unranked(frame: pd.DataFrame) -> pd.DataFrame:
    """The newest run of each recipe that has no `ok` run in the group that `compare` takes: label, status, reason."""
    group = _newest_group(frame)
    same = [name for name in SAME if name != "memory_source"]  # a run that failed early has none
    others = frame[(frame["status"] != Status.OK) & ~frame["label"].isin(group["label"])]
    others = others.merge(group[same].drop_duplicates()).sort_values("created_at")
    newest = others.drop_duplicates("label", keep="last").set_index("label")
    return newest[["status", "error"]].rename(columns={"error": "reason"})


class Comparison(Result):
    """A frame of records compared: the `table` of `compare`, what is `unranked`, and what both say."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self.table = compare(frame)
        self.unranked = unranked(frame)

    def __str__(self) -> str:
        lines = [comparison_text(self.table)]
        for label, row in self.unranked.iterrows():
            lines.append(f"not ranked: {label}: {row['status']}. {row['reason']}")
        lines.append("")
        lines += [f"- {sentence}" for sentence in conclusions(self.table)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what is missing, or infinite, is null."""
        return {
            **self.table.attrs,
            "rows": json.loads(self.table.reset_index().to_json(orient="records")),
            "unranked": self.unranked.astype(str).to_dict("index"),
            "conclusions": conclusions(self.table),
        }


def _beside(runs: pd.DataFrame, bases: pd.DataFrame) -> pd.DataFrame:
    """By label: speed ratios of runs to the baseline's beside them, or why there are none."""
    columns = ["seed", "created_at", "tokens_per_s", "contended_share"]
    both = runs.dropna(subset=["tokens_per_s"]).merge(bases[columns].dropna(subset=["tokens_per_s"]), on="seed")
    gap = (both["created_at_x"] - both["created_at_y"]).dt.total_seconds().abs()
    both = both.assign(gap=gap).sort_values("gap").drop_duplicates("id")
    disturbed = both[["contended_share_x", "contended_share_y"]].astype(float).max(axis=1) > DISTURBED
    reach = (2 * both["timed_steps"] * both["step_time_s"]).astype(float).clip(lower=BESIDE_S).fillna(BESIDE_S)
    both["timing"] = np.select([disturbed, both["gap"] > reach], ["disturbed", "apart"], "")
    ratios = (both["tokens_per_s_x"] / both["tokens_per_s_y"]).astype(float).where(both["timing"] == "")
    recipes = both.assign(ratio=ratios).groupby("label")
    table = recipes["ratio"].agg(speed_ratio="median", slowest="min", fastest="max", pairs="count")
    return table.assign(timing=recipes["timing"].max().where(table["pairs"] == 0, ""))


def _lost(row: pd.Series) -> float:
    """Seconds more than the baseline's for the tokens of the run; not a number where that is not known."""
    if row["pairs"] < 2:
        return float("nan")
    if row["slowest"] >= 1 - EQUAL:
        return 0.0
    if row["fastest"] >= 1:
        return float("nan")
    return float(row["tokens_seen"] / row["tokens_per_s"] * (1 - row["speed_ratio"]))


def _rate(row: pd.Series) -> float:
    """Bytes saved per second lost; infinite where no second is lost, zero where nothing is saved, else unknown."""
    if row["saved_bytes"] <= 0 or row.name == BASELINE:
        return 0.0
    return float(row["saved_bytes"] / row["lost_s"]) if row["lost_s"] else float("inf")


def _bargain(row: pd.Series) -> tuple[bool, float, float, bool]:
    """Sorts the best first. An unknown rate is less than any that is known, and more than none."""
    rate = np.nan_to_num(row["saved_bytes_per_lost_s"], nan=np.finfo(float).tiny)
    return row["saved_bytes"] < 0, -rate, -row["saved_bytes"], row.name != BASELINE


def _without_effect(row: pd.Series, base: pd.Series) -> str:
    """Finds the switch that did nothing, as fp16 on a CPU would: what it attacks is as large as without it."""
    attacked: dict[str, None] = {}
    for name in str(row["techniques"]).split("+"):
        if name in REGISTRY:
            attacked |= dict.fromkeys(REGISTRY[name].attacks)
    for category in attacked:
        now = row[f"{category}_maximum_bytes"]
        before = base[f"{category}_maximum_bytes"]
        if pd.isna(now) or pd.isna(before) or now < 0.999 * before:  # unknown is not idle
            return ""
    return ", ".join(category.replace("_", " ") for category in attacked)


def _newest_group(frame: pd.DataFrame) -> pd.DataFrame:
    """What is comparable with the newest run, or with the newest before it that has a baseline."""
    ok = frame[(frame["status"] == Status.OK) & frame["memory_cap_bytes"].isna()].dropna(subset=MEASURED)
    groups = [group for _, group in ok.groupby(SAME, dropna=False) if (group["label"] == BASELINE).any()]
    if groups:
        return max(groups, key=lambda group: group["created_at"].max())
    raise ConfigurationError(
        f"compare: {len(ok)} finished runs, none of them a baseline. Run one first: python -m workbench run MODEL"
    )


def _summary(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a recipe, over its seeds. The memory figures are of the seed with the largest peak."""
    rates = runs.sort_values(["rate_searched", "created_at"]).groupby("label")["learning_rate"].last()
    runs = runs[runs["learning_rate"] == runs["label"].map(rates)]
    recipes = runs.groupby("label")
    table = runs.loc[recipes["peak_allocated_bytes"].idxmax()].set_index("label")[KEPT].astype(object).infer_objects()
    for name, middle in (("held_out_loss", "mean"), ("tokens_per_s", "median")):
        values = recipes[name]
        table[name] = values.agg(middle).astype(float)
        table[f"{name}_spread"] = (values.max() - values.min()).where(values.size() > 1).astype(float)
    return table.assign(rate_searched=recipes["rate_searched"].any(), seeds=recipes.size())


def verdict(row: pd.Series, base: pd.Series) -> str:
    """`same` to six digits; else `not searched` without a search for both learning rates, `?` with one seed, `tie`
    within the larger of the two spreads, `better` or `worse`."""
    difference = row["loss_difference"]
    spread = _spread(row, base, "held_out_loss")
    if row.name == BASELINE or pd.isna(difference):
        return ""
    if abs(difference) < 1e-6 * base["held_out_loss"]:
        return "same"
    if pd.isna(spread):
        return "?"
    if not (row["rate_searched"] and base["rate_searched"]):
        return "not searched"
    if abs(difference) <= spread:
        return "tie"
    return "better" if difference < 0 else "worse"


def _spread(a: pd.Series, b: pd.Series, column: str) -> float:
    """The larger of two seed-to-seed spreads; unknown if one of them is."""
    return float(np.maximum(a[f"{column}_spread"], b[f"{column}_spread"]))


def pareto(table: pd.DataFrame) -> list[str]:
    """Labels that no other row beats: no worse in memory, speed and loss, and better in one. Ties beat nothing."""
    rows = [row for _, row in table.iterrows()]
    return [str(row.name) for row in rows if not any(_beats(other, row) for other in rows)]


def _beats(a: pd.Series, b: pd.Series) -> bool:
    speed_range = max(EQUAL, a["fastest"] - a["slowest"], b["fastest"] - b["slowest"])
    gains = [
        b["peak_allocated_bytes"] - a["peak_allocated_bytes"],
        _beyond(a["speed_ratio"] - b["speed_ratio"], speed_range),
        _beyond(b["held_out_loss"] - a["held_out_loss"], _spread(a, b, "held_out_loss")),
    ]
    return bool(min(gains) >= 0 and max(gains) > 0)


def _beyond(difference: float, spread: float) -> float:
    """The difference, or zero where it is inside the spread or unknown."""
    return difference if abs(difference) > np.nan_to_num(spread) else 0.0


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """The columns that people read, in their order: as text, but for the peak, whose bar wants a number."""
    columns = {"peak": table["peak_allocated_bytes"], "saves": table["saved_fraction"].map(_percent)}
    for column, title in ELSEWHERE.items():
        if table[column].any():
            columns[title] = table[column].map(format_bytes, na_action="ignore").fillna("")
    columns["held-out loss"] = table.apply(_with_spread, axis=1, column="held_out_loss", digits=".3f")
    columns["against baseline"] = table["loss_verdict"]
    columns["tokens/s"] = table.apply(_with_spread, axis=1, column="tokens_per_s", digits=",.0f")
    columns["speed"] = table.apply(_speed, axis=1)
    columns["saved per second lost"] = table["saved_bytes_per_lost_s"].map(_bargain_in_words)
    columns["trainable"] = table["trainable_parameters"].map("{:,}".format)
    columns["learning rate"] = table["learning_rate"].map("{:.0e}".format)
    columns["peak is in"] = table["peak_phase"].str.replace("_", " ")
    return pd.DataFrame(columns, index=table.index.rename(None))


def _percent(fraction: float) -> str:
    return f"{round(fraction, 2) + 0:.0%}"  # no minus before a zero


def _with_spread(row: pd.Series, column: str, digits: str) -> str:
    value = row[column]
    spread = row[f"{column}_spread"]
    if pd.isna(value):
        return "–"
    return f"{value:{digits}}" if pd.isna(spread) else f"{value:{digits}} ± {spread / 2:{digits}}"


def _speed(row: pd.Series) -> str:
    if pd.isna(row["speed_ratio"]):
        return row["timing"] or "–"
    half = (row["fastest"] - row["slowest"]) / 2
    return f"{row['speed_ratio']:.2f}" + (f" ± {half:.2f}" if half else "") + "×"


def _bargain_in_words(rate: float) -> str:
    if pd.isna(rate):
        return "?"
    if rate == np.inf:
        return "free"
    return format_bytes(rate) if rate else ""


def style_comparison(table: pd.DataFrame) -> "pd.io.formats.style.Styler":
    """The table as people read it, with bars behind the peaks; all text is escaped."""
    styler = _shown(table).style.format({"peak": format_bytes}, escape="html").format_index(escape="html", axis=0)
    narrow = [{"selector": "td", "props": "white-space: nowrap; padding: 0.3em 0.5em"}]
    styler = styler.set_table_styles([*narrow, {"selector": "th", "props": "padding: 0.3em 0.5em"}])
    return styler.bar(subset=["peak"], color="#E69F0066", vmin=0).set_caption(html.escape(caption(table)))


def comparison_text(table: pd.DataFrame) -> str:
    """The same table for a terminal."""
    return f"{_shown(table).to_string(formatters={'peak': format_bytes})}\n\n{caption(table)}"


def caption(table: pd.DataFrame) -> str:
    """What the rows have in common, in one line."""
    facts = table.attrs
    seeds = table["seeds"].max()
    shape = f"{facts['effective_batch_size']} × {facts['sequence_length']} tokens a step, {facts['steps']} steps"
    text = f"{facts['model']} on {facts['corpus']}: {shape}, {seeds} seed{'s' if seeds > 1 else ''}"
    if facts["arguments"]:
        text += f", with {facts['arguments']}"
    text += f". Memory: {facts['memory_source']} on {facts['device']}"
    if facts["shard"]:
        text += f", the highest of {facts['world_size']} ranks ({facts['shard']})"
    if _is_emulated(table):
        text += f"; {WITHOUT_VALUES}, so no loss and no speed"
    return f"{text}."


def _is_emulated(table: pd.DataFrame) -> bool:
    return str(table.attrs["memory_source"]).startswith("emulated")


def conclusions(table: pd.DataFrame) -> list[str]:
    """What the table says, in sentences computed from it."""
    others = table.drop(index=BASELINE)
    if others.empty:
        return ["There is only the baseline so far."]
    smallest = _smallest(others, table.loc[BASELINE])
    if _is_emulated(table):
        return [smallest, *_idle(others), f"Of loss and speed nothing is known: {WITHOUT_VALUES}."]
    unbeaten = f"Not beaten in memory, speed and loss at once: {', '.join(pareto(table))}."
    return [smallest, _unharmed(others), _fastest(others), *_untimed(others), *_idle(others), unbeaten]


def _smallest(others: pd.DataFrame, base: pd.Series) -> str:
    best = others.loc[others["peak_allocated_bytes"].idxmin()]
    largest = base[[f"{category}_bytes" for category in Category]].astype(float).idxmax().removesuffix("_bytes")
    return (
        f"{best.name} has the smallest peak, {format_bytes(best['peak_allocated_bytes'])} instead of "
        f"{format_bytes(base['peak_allocated_bytes'])} ({best['saved_fraction']:.0%} less). The largest part of the "
        f"baseline's peak is {largest.replace('_', ' ')}, {format_bytes(base[f'{largest}_bytes'])}, and the peak "
        f"comes in the {base['peak_phase'].replace('_', ' ')} phase."
    )


def _unharmed(others: pd.DataFrame) -> str:
    free = others[others["loss_verdict"].isin(["same", "tie", "better"])]
    sentences = [f"Held-out loss no worse than the baseline's (or a tie): {', '.join(free.index) or 'none'}."]
    titles = {"worse": "Worse", "?": "Not to be told with one seed", "not searched": "Not judged, for want of a search"}
    for word, title in titles.items():
        differences = others["loss_difference"][others["loss_verdict"] == word]
        labels = [f"{label} ({difference:+.3f})" for label, difference in differences.items()]
        if labels:
            sentences.append(f"{title}: {', '.join(labels)}.")
    return " ".join(sentences)


def _fastest(others: pd.DataFrame) -> str:
    timed = others["speed_ratio"].dropna().sort_values(kind="stable")
    if timed.empty:
        return "No speed can be compared."
    fastest = f"at {timed.iloc[-1]:.2f}× the baseline's speed"
    if len(timed) == 1:
        return f"Here {timed.index[0]} runs {fastest}."
    slowest = f"{timed.index[0]} the slowest at {timed.iloc[0]:.2f}×"
    return f"Here {timed.index[-1]} is the fastest {fastest} and {slowest}."


def _untimed(others: pd.DataFrame) -> list[str]:
    reasons = {
        "disturbed": f"other programs took more than {DISTURBED:.0%} of the processors' time",
        "apart": "the baseline was not run beside them, and the machine may have changed since",
    }
    untimed = []
    for timing, reason in reasons.items():
        labels = others.index[others["timing"] == timing]
        if len(labels):
            untimed.append(f"{', '.join(labels)} ({reason})")
    if not untimed:
        return []
    return [f"Speeds that are not compared: {'; '.join(untimed)}. `workbench.side_by_side` takes turns."]


def _idle(others: pd.DataFrame) -> list[str]:
    idle = others["without_effect"][others["without_effect"] != ""]
    return [f"{label} changed nothing of what it attacks: {categories}." for label, categories in idle.items()]
