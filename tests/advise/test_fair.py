"""Rates are searched in the same way, and runs take turns: on a made-up landscape of losses, and once for real."""

import math
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.advise.test_compare import record
from workbench.advise import fair
from workbench.advise.compare import compare
from workbench.advise.fair import search, side_by_side
from workbench.advise.frame import to_frame
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Status, read_all
from workbench.recipe import Recipe
from workbench.techniques import FusedGelu, GradientCheckpointing, Lora, Optimizer, StepInBackward

RECIPE = Recipe(model="gpt2-tiny")
CUSTOMARY = 1e-3


@pytest.fixture
def runs(monkeypatch):
    """The recipes that were run, in their order. The loss is least at a rate that the label decides, and grows with
    each halving and doubling beyond; above 0.1 all diverges."""

    def run(recipe, *, device, reuse):
        rate = recipe.learning_rate or CUSTOMARY
        done.append(recipe)
        loss = 4 + abs(math.log2(rate / best.get(recipe.label, CUSTOMARY)))
        facts = {"learning_rate": rate, "rates_tried": {}}
        if rate > 0.1:
            return record(recipe.label, recipe.seed, loss=None, status=Status.DIVERGED, **facts)
        made = record(recipe.label, recipe.seed, loss=None if emulated else loss, **facts)
        return replace(made, created_at=datetime.now(UTC).isoformat(timespec="milliseconds"))

    emulated, best, done = [], {}, []
    monkeypatch.setattr(fair, "run", run)
    monkeypatch.setattr(fair.Record, "save", lambda *_: None)
    return emulated, best, done


def test_a_search_goes_on_until_the_rates_to_either_side_are_worse(runs, subtests):
    _, best, _ = runs
    for halvings, rates in ((0, 3), (3, 5), (-2, 5), (20, fair.MOST + 1)):
        with subtests.test(halvings=halvings):
            best["baseline"] = CUSTOMARY / 2.0**halvings
            result, tried = search(RECIPE)
            edge = CUSTOMARY / 2.0 ** min(halvings, fair.MOST)
            assert (result.learning_rate, len(tried)) == (edge, rates)
            frame = to_frame([record(rates_tried=tried)])
            assert frame["rate_searched"].tolist() == [halvings < fair.MOST], "at the edge it may be better still"


def test_rates_that_diverge_or_that_no_recipe_may_have_bound_a_search(runs):
    _, best, done = runs
    best["baseline"] = 10.0
    found, tried = search(replace(RECIPE, learning_rate=0.05))
    assert found.learning_rate == 0.1
    assert tried["0.2"] is None
    best["baseline"] = 0.08
    done.clear()
    assert search(replace(RECIPE, learning_rate=10.0))[0].learning_rate == pytest.approx(10 / 128)
    assert max(recipe.learning_rate for recipe in done) <= 10


def test_the_start_does_not_decide_where_a_search_ends(runs):
    assert {search(replace(RECIPE, learning_rate=CUSTOMARY * 2.0**k))[0].learning_rate for k in (-3, 0, 4)} == {1e-3}


def test_all_take_turns_each_at_its_own_best_rate(runs):
    _, best, done = runs
    best |= {"baseline": CUSTOMARY / 2, "lora": CUSTOMARY * 4, "gradient_checkpointing": CUSTOMARY * 8}
    others = (RECIPE | Lora(), RECIPE | GradientCheckpointing())
    found = side_by_side(RECIPE, *others, seeds=2)
    turns = [(recipe.label, recipe.seed, recipe.learning_rate) for recipe in done[-6:]]
    exact = CUSTOMARY / 2  # whatever the made-up landscape says: it has the baseline's losses
    assert turns == [
        (label, seed, rate)
        for seed in range(2)
        for label, rate in (("lora", CUSTOMARY * 4), ("gradient_checkpointing", exact), ("baseline", CUSTOMARY / 2))
    ]
    assert [[each.recipe.seed for each in runs] for runs in found] == [[0, 1]] * 3
    assert all(to_frame([each for runs in found for each in runs])["rate_searched"])
    assert not [recipe for recipe in done[:-6] if recipe.label == "gradient_checkpointing"]


def test_the_baseline_is_timed_again_after_every_few_others(runs):
    others = [
        RECIPE | Optimizer(kind=kind) for kind in ("sgd", "adafactor", "sgd_momentum", "adamw_loop", "adamw_fused")
    ]
    found = side_by_side(RECIPE, *others, seeds=1)
    assert [recipe.label == "baseline" for recipe in runs[2]] == [False] * 4 + [True, False, True]
    assert len(found[0]) == 2


def test_only_what_is_exact_takes_over_the_search(runs, subtests):
    _, _, done = runs
    for case, other, alike in (
        ("exact", RECIPE | GradientCheckpointing() | FusedGelu(), True),
        ("lora", RECIPE | GradientCheckpointing() | Lora(), False),
        ("clips otherwise", RECIPE | StepInBackward(), False),
        ("other steps", replace(RECIPE, steps=13) | FusedGelu(), False),
    ):
        with subtests.test(case=case):
            done.clear()
            side_by_side(RECIPE, other, seeds=2)
            searched = [recipe for recipe in done if recipe.label == other.label and recipe.seed == 0]
            assert (len(searched) == 1) == alike


def test_with_one_seed_or_without_values_nothing_is_searched(runs):
    emulated, _, done = runs
    side_by_side(RECIPE, RECIPE | Lora(), seeds=1)
    assert [recipe.label for recipe in done] == ["lora", "baseline"]
    emulated.append(True)
    done.clear()
    side_by_side(RECIPE, RECIPE | Lora(), seeds=2)
    assert {recipe.learning_rate for recipe in done} == {None}


@pytest.mark.dear
@pytest.mark.smoke
@pytest.mark.values
def test_for_real_rates_are_searched_runs_timed_in_turn_and_verdicts_told(model_name, text_file):
    recipe = Recipe(model=model_name, corpus=str(text_file), steps=5, sequence_length=16, dropout=0.0)
    runs = side_by_side(recipe, recipe | Optimizer(kind="sgd"), recipe | FusedGelu(), seeds=2, device="cpu")
    assert {record.status for of_one_recipe in runs for record in of_one_recipe} == {Status.OK}
    table = compare(to_frame(read_all()))
    assert table["rate_searched"].all()
    assert set(table["timing"]) <= {"", "disturbed"}, "none is apart"
    assert (table["pairs"][table["timing"] == ""] > 0).all()
    assert table.loc["fused_gelu", "loss_verdict"] in ("same", "tie")
    tried = {label: len(rows["learning_rate"].unique()) for label, rows in to_frame(read_all()).groupby("label")}
    assert tried["fused_gelu"] == 1
    assert min(tried["baseline"], tried["optimizer(kind=sgd)"]) >= 3


def test_what_cannot_run_is_said_before_anything_does(model_name):
    with pytest.raises(ConfigurationError, match="given twice"):
        side_by_side(Recipe(model=model_name), Recipe(model=model_name) | Lora() | Lora(rank=2))
    assert not read_all()
