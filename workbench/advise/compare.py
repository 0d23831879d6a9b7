"""Records side by side: what each recipe saves against the baseline, what it costs, and which ones are worth it.

Only comparable runs are put into one table. They have the same model, text, batch, length, steps, dropout, world
(device, threads, number of ranks) and source of the memory figures, and no memory cap, under which speed may be
unknown. Several seeds of a recipe become one row. Loss differences inside the seed-to-seed spread are ties, and a
verdict on them needs learning rates that were searched (`workbench.advise.fair`). Speeds are compared run by run, each
with the baseline's run beside it in time, and not where other programs took processors from one of them.
"""

import numpy as np
import pandas as pd

from workbench.base.categories import Category, format_bytes
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Status

IN_COMMON = ["model", "corpus", "effective_batch_size", "sequence_length", "steps", "dropout"]
IN_COMMON += ["arguments", "memory_source", "world_size", "shard"]
SAME = [*IN_COMMON, "data_sha256", "device_kind", "device_name", "threads"]
BASELINE = "baseline"
MEASURED = ["peak_allocated_bytes", "trainable_parameters", "learning_rate"]
WITHOUT_VALUES = "an emulated GPU computes no values"
BY_CATEGORY = [f"{category}_bytes" for category in Category]
# Columns of what was moved out of the device, and their titles.
ELSEWHERE = {"peak_host_bytes": "in host memory", "peak_disk_bytes": "on disk"}
# Columns that a row takes from the seed with the largest peak.
KEPT = [*MEASURED, "techniques", "memory_source", *BY_CATEGORY, *ELSEWHERE]

# Part of the processors' time that other programs may take from a timed run. It was 0.03 on two quiet cores, and 0.34
# beside one busy process.
DISTURBED = 0.1
# Seconds between the beginnings of two runs that are compared in speed, at most; or twice the time of the steps.
BESIDE_S = 120.0


def compare(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one row for each recipe of `records()`, the smallest peak first.

    Of several groups of comparable runs, the one with the newest run is taken among those that have a baseline. Of
    several runs with one seed, the newest counts; of several learning rates, the one that was searched. Columns:
    `peak_allocated_bytes`, `saved_bytes`, `saved_fraction`, `held_out_loss` (mean over seeds), `held_out_loss_spread`
    (largest minus smallest; missing with one seed), `loss_difference`, `loss_verdict`, `rate_searched`, `tokens_per_s`
    (median), `speed_ratio` (median over the runs, each against the baseline's run with its seed that is nearest in
    time), `slowest` and `fastest` of these ratios, `pairs` (how many they are), `timing` (why there are none:
    `disturbed` by other programs, or too far `apart` in time), `trainable_parameters`, `learning_rate`, `seeds`,
    `techniques`, `memory_source`, the bytes of each category at the peak, and those of `peak_host_bytes` and
    `peak_disk_bytes`, missing where nothing was moved out of the device. What the rows have in common is in `.attrs`.

    Raises:
        ConfigurationError: there is no finished run, or none of them is without techniques.
    """
    group = _newest_group(frame)
    runs = group.sort_values("created_at").drop_duplicates(["label", "learning_rate", "seed"], keep="last")
    speeds = _compare_speeds(runs, group[group["label"] == BASELINE])
    table = _summary(runs).join(speeds).fillna({"pairs": 0, "timing": ""})
    base = table.loc[BASELINE]
    table["saved_bytes"] = base["peak_allocated_bytes"] - table["peak_allocated_bytes"]
    table["saved_fraction"] = table["saved_bytes"] / base["peak_allocated_bytes"]
    table["loss_difference"] = table["held_out_loss"] - base["held_out_loss"]
    table["loss_verdict"] = table.apply(verdict, axis=1, base=base)
    table = table.sort_values("peak_allocated_bytes", kind="stable")
    newest = group.iloc[-1]
    table.attrs = {name: str(newest[name]) for name in [*IN_COMMON, "device"]}
    return table


def list_unranked(frame: pd.DataFrame) -> pd.DataFrame:
    """Return label, status and reason of each recipe that has no `ok` run in the group that `compare` takes: those of
    its newest run."""
    group = _newest_group(frame)
    # A run that failed early has no source of its memory figures.
    same = group[SAME].drop(columns="memory_source").drop_duplicates()
    others = frame[(frame["status"] != Status.OK) & ~frame["label"].isin(group["label"])]
    others = others.merge(same).sort_values("created_at")
    newest = others.drop_duplicates("label", keep="last").set_index("label")
    return newest[["status", "error"]].rename(columns={"error": "reason"})


def _compare_speeds(runs: pd.DataFrame, bases: pd.DataFrame) -> pd.DataFrame:
    """Return by label the speed of runs against the baseline's runs beside them, or why there is no such ratio.

    Args:
        runs: all runs of the group.
        bases: those of the baseline.
    """
    columns = ["seed", "created_at", "tokens_per_s", "contended_share"]
    both = runs.merge(bases[columns], on="seed").dropna(subset=["tokens_per_s_x", "tokens_per_s_y"])
    gap = (both["created_at_x"] - both["created_at_y"]).dt.total_seconds().abs()
    both = both.assign(gap=gap).sort_values("gap").drop_duplicates("id")
    disturbed = both[["contended_share_x", "contended_share_y"]].astype(float).max(axis=1) > DISTURBED
    reach = (2 * both["timed_steps"] * both["step_time_s"]).astype(float).clip(lower=BESIDE_S).fillna(BESIDE_S)
    both["timing"] = np.select([disturbed, both["gap"] > reach], ["disturbed", "apart"], "")
    ratios = (both["tokens_per_s_x"] / both["tokens_per_s_y"]).astype(float).where(both["timing"] == "")
    recipes = both.assign(ratio=ratios).groupby("label")
    table = recipes["ratio"].agg(speed_ratio="median", slowest="min", fastest="max", pairs="count")
    return table.assign(timing=recipes["timing"].max().where(table["pairs"] == 0, ""))


def _newest_group(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that are comparable with the newest one, or with the newest before it that has a baseline."""
    ok = frame[(frame["status"] == Status.OK) & frame["memory_cap_bytes"].isna()].dropna(subset=MEASURED)
    groups = []
    for _, group in ok.groupby(SAME, dropna=False):
        if (group["label"] == BASELINE).any():
            groups.append(group)
    if groups:
        return max(groups, key=lambda group: group["created_at"].max())
    raise ConfigurationError(
        f"compare: {len(ok)} finished runs, none of them a baseline. Run one first: python -m workbench run MODEL"
    )


def _summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each recipe, over its seeds. The memory figures are of the seed with the largest peak."""
    rates = runs.sort_values(["rate_searched", "created_at"]).groupby("label")["learning_rate"].last()
    runs = runs[runs["learning_rate"] == runs["label"].map(rates)]
    recipes = runs.groupby("label")
    largest = runs.loc[recipes["peak_allocated_bytes"].idxmax()]
    table = largest.set_index("label")[KEPT].astype(object).infer_objects()
    losses = recipes["held_out_loss"]
    table["held_out_loss"] = losses.mean().astype(float)
    table["held_out_loss_spread"] = (losses.max() - losses.min()).where(losses.size() > 1).astype(float)
    table["tokens_per_s"] = recipes["tokens_per_s"].median().astype(float)
    return table.assign(rate_searched=recipes["rate_searched"].any(), seeds=recipes.size())


def verdict(row: pd.Series, base: pd.Series) -> str:
    """Compare the loss of a recipe with the baseline's.

    Losses are the `same` if they agree to six digits. Otherwise the verdict is `?` with one seed, `not searched`
    without a search for both learning rates, `tie` within the larger of the two spreads, and else `better` or `worse`.
    The baseline itself, and a recipe without a loss, have none.
    """
    difference = row["loss_difference"]
    # NumPy's maximum is missing if one of the spreads is, which is what a verdict needs.
    spread = np.maximum(row["held_out_loss_spread"], base["held_out_loss_spread"])
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
    if difference < 0:
        return "better"
    return "worse"


def comparison_text(table: pd.DataFrame, others: pd.DataFrame | None = None) -> str:
    """Return the columns that people read as text, with a caption, and the recipes that are not ranked.

    Args:
        others: the table of `list_unranked`.
    """
    columns = {
        "peak": table["peak_allocated_bytes"].map(format_bytes),
        # Adding zero takes the minus from a negative zero.
        "saves": (table["saved_fraction"].round(2) + 0).map("{:.0%}".format),
    }
    for column, title in ELSEWHERE.items():
        if table[column].any():
            columns[title] = table[column].map(format_bytes, na_action="ignore").fillna("")
    columns["held-out loss"] = table.apply(_loss, axis=1)
    columns["against baseline"] = table["loss_verdict"]
    rates = table["tokens_per_s"].map("{:,.0f}".format, na_action="ignore")
    columns["tokens/s"] = rates.astype(object).fillna("–")
    columns["speed"] = table.apply(_speed, axis=1)
    lines = [pd.DataFrame(columns, index=table.index.rename(None)).to_string(), "", caption(table)]
    if others is not None:
        for label, row in others.iterrows():
            lines.append(f"not ranked: {label}: {row['status']}. {row['reason']}")
    return "\n".join(lines)


def _loss(row: pd.Series) -> str:
    loss = row["held_out_loss"]
    half = row["held_out_loss_spread"] / 2
    if pd.isna(loss):
        return "–"
    if pd.isna(half):
        return f"{loss:.3f}"
    return f"{loss:.3f} ± {half:.3f}"


def _speed(row: pd.Series) -> str:
    if pd.isna(row["speed_ratio"]):
        return row["timing"] or "–"
    half = (row["fastest"] - row["slowest"]) / 2
    if half:
        return f"{row['speed_ratio']:.2f} ± {half:.2f}×"
    return f"{row['speed_ratio']:.2f}×"


def caption(table: pd.DataFrame) -> str:
    """Return one line with all that the rows have in common."""
    facts = table.attrs
    count = table["seeds"].max()
    seeds = f"{count} seeds" if count > 1 else "1 seed"
    shape = f"{facts['effective_batch_size']} × {facts['sequence_length']} tokens a step, {facts['steps']} steps"
    text = f"{facts['model']} on {facts['corpus']}: {shape}, {seeds}"
    if facts["arguments"]:
        text += f", with {facts['arguments']}"
    text += f". Memory: {facts['memory_source']} on {facts['device']}"
    if facts["shard"]:
        text += f", the highest of {facts['world_size']} ranks ({facts['shard']})"
    if str(facts["memory_source"]).startswith("emulated"):
        text += f"; {WITHOUT_VALUES}, so no loss and no speed"
    return f"{text}."
