"""Recipes side by side, fairly: each at a learning rate that was searched in the same way, all timed in turn."""

import math
from dataclasses import replace
from datetime import UTC, datetime

from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.techniques import Numerics
from workbench.training.run import run

FACTOR = 2.0  # a search tries rates that differ by this factor
MOST = 8  # rates that are tried to each side of the first, at most
LIMITS = Recipe.__dataclass_fields__["learning_rate"].metadata
BETWEEN = 4  # recipes that are timed between two runs of the first one

RatesTried = dict[str, float | None]  # the held-out loss by learning rate; None: it diverged


def side_by_side(
    recipe: Recipe,
    *others: Recipe,
    seeds: int = 3,
    reuse: bool = False,
    device: str | None = None,
) -> list[list[Record]]:
    """Run a recipe and others that are compared with it: for each of them return a list, with a run of every seed.

    The held-out loss of each is that of its best learning rate (`search`). A recipe that differs from the first in
    exact techniques alone has the same losses at every rate, and takes over its search. With one seed no verdict would
    be possible, so that nothing is searched. Then all take turns, seed by seed: whatever slows the machine for a while
    slows the recipe and the others alike. The recipe itself may have several runs of a seed.

    Args:
        seeds: how many seeds each recipe is run with: 0, 1, …
        reuse: whether to take runs that are on record. The recipe is timed again beside those that are not.
        device: the device, as `run` has it.

    Raises what `run` raises.
    """

    def find_rate(other: Recipe) -> tuple[Recipe, RatesTried]:
        return search(other, device=device) if seeds > 1 else (other, {})

    def run_with_seed(other: Recipe, rates: RatesTried, seed: int, reuse: bool) -> Record:
        record = run(replace(other, seed=seed), device=device, reuse=reuse)
        record = replace(record, rates_tried=rates or record.rates_tried)
        record.save()
        return record

    first, first_rates = find_rate(recipe)
    chosen = [_take_over_rate(other, recipe, first, first_rates) or find_rate(other) for other in others]
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    runs: list[list[Record]] = [[] for _ in (recipe, *others)]
    for seed in range(seeds):
        for start in range(0, len(chosen) or 1, BETWEEN):
            is_new = False
            for place, (other, rates) in enumerate(chosen[start : start + BETWEEN], start + 1):
                record = run_with_seed(other, rates, seed, reuse)
                runs[place].append(record)
                is_new = is_new or record.created_at >= began
            record = run_with_seed(first, first_rates, seed, reuse and not is_new)
            if record not in runs[0]:  # one run on record may serve several turns
                runs[0].append(record)
    return runs


def _take_over_rate(
    other: Recipe,
    recipe: Recipe,
    first: Recipe,
    rates: RatesTried,
) -> tuple[Recipe, RatesTried] | None:
    """Return the other recipe at the first one's rate, with its search; None if its losses may be others.

    Args:
        recipe: the first recipe before its search.
        first: the first recipe at its best rate.
        rates: the rates that its search tried.
    """
    shared = set(recipe.techniques)
    more = set(other.techniques) - shared
    if replace(other, techniques=recipe.techniques) != recipe or not shared <= set(other.techniques):
        return None
    if any(technique.numerics is not Numerics.EXACT for technique in more):
        return None
    return replace(other, learning_rate=first.learning_rate), rates


def search(recipe: Recipe, *, device: str | None = None) -> tuple[Recipe, RatesTried]:
    """Return the recipe at its best learning rate, and the held-out loss at every rate that was tried.

    The search begins with the rate that the recipe would have, its double and its half. It goes on from the best of
    them until the rates to both sides of it are worse, with the recipe's own seed. Runs that are on record are taken.
    On an emulated GPU, which computes no losses, nothing is tried.
    """
    first = run(recipe, device=device, reuse=True)
    if first.learning_rate is None or (first.status is Status.OK and first.held_out_loss is None):
        return recipe, {}
    lowest = max(LIMITS["minimum"], first.learning_rate / FACTOR**MOST)
    highest = min(LIMITS["maximum"], first.learning_rate * FACTOR**MOST)
    losses: dict[float, float] = {}
    best = first.learning_rate
    waiting = [best]
    while waiting:
        record = run(replace(recipe, learning_rate=waiting[0]), device=device, reuse=True)
        losses[waiting[0]] = math.inf
        if record.held_out_loss is not None:
            losses[waiting[0]] = record.held_out_loss
        # If all have diverged, the search goes on from the smallest rate.
        best = min(losses, key=lambda rate: (losses[rate], rate))
        neighbours = {best / FACTOR, best * FACTOR} - losses.keys()
        waiting = [rate for rate in sorted(neighbours) if lowest <= rate <= highest]
    tried: RatesTried = {}
    for rate in sorted(losses):
        tried[f"{rate:g}"] = None
        if losses[rate] < math.inf:
            tried[f"{rate:g}"] = losses[rate]
    return replace(recipe, learning_rate=best), tried
