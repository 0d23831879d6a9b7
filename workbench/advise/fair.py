"""Recipes side by side, fairly: each at a learning rate that was searched in the same way, all timed in turn."""

import math
from dataclasses import replace
from datetime import UTC, datetime

from workbench.journal.record import Record, Status
from workbench.recipe import Recipe
from workbench.techniques import Numerics
from workbench.training.run import run

FACTOR = 2.0  # between the rates that a search tries
MOST = 8  # rates tried to each side of the first
LIMITS = Recipe.__dataclass_fields__["learning_rate"].metadata
BETWEEN = 4  # recipes timed between two runs of the first

Tried = dict[str, float | None]


def side_by_side(
    recipe: Recipe,
    *others: Recipe,
    seeds: int = 3,
    reuse: bool = False,
    device: str | None = None,
) -> list[list[Record]]:
    """Runs of a recipe and of others that are compared with it: for each of them a list, with a run of every seed.

    The held-out loss of each is that of its best learning rate (`search`). What differs from the recipe in exact
    techniques alone has the same losses at every rate, and takes over its search. With one seed no verdict would be
    possible, and nothing is searched. Then all take turns, seed by seed, so that what slows the machine for a while
    slows the recipe and the others alike; of the recipe itself there may be several runs of a seed.

    Args:
        seeds: 0, 1, … so many.
        reuse: take runs that are on record, and time the recipe again beside those that are not.
        device: as `run` has it.

    Raises what `run` raises.
    """

    def rated(other: Recipe) -> tuple[Recipe, Tried]:
        return search(other, device=device) if seeds > 1 else (other, {})

    def timed(other: Recipe, rates: Tried, seed: int, reuse: bool) -> Record:
        record = run(replace(other, seed=seed), device=device, reuse=reuse)
        record = replace(record, rates_tried=rates or record.rates_tried)
        record.save()
        return record

    first, first_rates = rated(recipe)
    chosen = [_taken_over(other, recipe, first, first_rates) or rated(other) for other in others]
    began = datetime.now(UTC).isoformat(timespec="milliseconds")
    runs: list[list[Record]] = [[] for _ in (recipe, *others)]
    for seed in range(seeds):
        for start in range(0, len(chosen) or 1, BETWEEN):
            is_new = False
            for place, (other, rates) in enumerate(chosen[start : start + BETWEEN], start + 1):
                record = timed(other, rates, seed, reuse)
                runs[place].append(record)
                is_new = is_new or record.created_at >= began
            record = timed(first, first_rates, seed, reuse and not is_new)
            if record not in runs[0]:  # of what is on record there may be one for all
                runs[0].append(record)
    return runs


def _taken_over(other: Recipe, recipe: Recipe, rated: Recipe, tried: Tried) -> tuple[Recipe, Tried] | None:
    """The recipe's rate and search, if the other has the same losses whatever the rate."""
    shared = set(recipe.techniques)
    more = set(other.techniques) - shared
    if replace(other, techniques=recipe.techniques) != recipe or not shared <= set(other.techniques):
        return None
    if any(technique.numerics is not Numerics.EXACT for technique in more):
        return None
    return replace(other, learning_rate=rated.learning_rate), tried


def search(recipe: Recipe, *, device: str | None = None) -> tuple[Recipe, Tried]:
    """The recipe at its best learning rate, and the held-out loss at every rate that was tried; None: it diverged.

    Tried are the rate that it would have, its double and its half, and on from the best of them until a rate to either
    side of it is worse, with the recipe's own seed. Runs that are on record are taken. On an emulated GPU, which knows
    no losses, nothing is tried.
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
        # where all have diverged the smallest, from which to go on
        best = min(losses, key=lambda rate: (losses[rate], rate))
        neighbours = {best / FACTOR, best * FACTOR} - losses.keys()
        waiting = [rate for rate in sorted(neighbours) if lowest <= rate <= highest]
    tried: Tried = {}
    for rate in sorted(losses):
        tried[f"{rate:g}"] = None
        if losses[rate] < math.inf:
            tried[f"{rate:g}"] = losses[rate]
    return replace(recipe, learning_rate=best), tried
