import dataclasses
import math
from itertools import product

import pandas as pd
import pytest

from workbench.advise.compare import caption, compare, comparison_text, list_unranked
from workbench.advise.frame import to_frame
from workbench.base.categories import Category
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status

COUNT = iter(range(10_000))
SEARCHED = {"0.0005": 9.0, "0.001": 1.0, "0.002": None}


def record(label="baseline", seed=0, peak=100, loss=4.0, speed=1000.0, status=Status.OK, **more) -> Record:
    number = next(COUNT)
    facts = {
        "model": "gpt2-tiny", "device_kind": "cpu", "device_name": "Xeon", "threads": 2,
        "memory_source": "cpu-tracker", "learning_rate": 1e-3,
        "peak_allocated_bytes": peak, "peak_phase": "backward", "held_out_loss": loss, "tokens_per_s": speed,
        "trainable_parameters": 10, "tokens_seen": 1000, "losses": [5.0, loss], "rates_tried": SEARCHED,
        "by_category": {str(c): 0 for c in Category} | {"weights": peak},
    }  # fmt: skip
    recipe = {"corpus": "shakespeare", "effective_batch_size": 8, "sequence_length": 128, "steps": 2, "seed": seed}
    when = f"2026-01-01T00:{number // 60:02}:{number % 60:02}.000+00:00"
    return Record(f"id{number}", when, status, recipe, f"r{number}", label, **{**facts, **more})


def table_of(*records):
    return compare(to_frame(list(records)))


def test_savings_are_against_the_baseline_and_the_smallest_peak_comes_first():
    table = table_of(record(peak=200), record("lora", peak=50), record("checkpointing", peak=150))
    assert list(table.index) == ["lora", "checkpointing", "baseline"]
    assert table.loc["lora", "saved_bytes"] == 150
    assert table.loc["lora", "saved_fraction"] == 0.75
    assert table.loc["baseline", "saved_bytes"] == 0


def twice(*given, **more):
    return [record(*given, seed=seed, **more) for seed in range(2)]


def test_speeds_are_compared_seed_by_seed_so_that_a_machine_which_slows_down_slows_both():
    runs = [record(seed=s, speed=1000 / (1 + s)) for s in range(2)]
    runs += [record("x", seed=s, peak=90, speed=500 / (1 + s)) for s in range(2)]
    row = table_of(*runs).loc["x"]
    assert (row["speed_ratio"], row["slowest"], row["fastest"], row["pairs"]) == (0.5, 0.5, 0.5, 2)


def test_the_baselines_run_nearest_in_time_is_the_one_beside():
    early, late = record(speed=1000), record(speed=100)
    far = dataclasses.replace(early, id="far", created_at="2025-12-31T00:00:00.000+00:00", tokens_per_s=7.0)
    assert table_of(far, early, late, record("x", speed=50)).loc["x", "speed_ratio"] == 0.5
    table = table_of(far, record("x", peak=1))
    assert (table.loc["x", "timing"], table.loc["x", "pairs"]) == ("apart", 0)
    assert "apart" in comparison_text(table)
    hours = record("x", peak=1, timed_steps=1000, step_time_s=100.0)
    assert table_of(far, hours).loc["x", "timing"] == "", "a day is not long beside a training of a day"


def test_a_disturbed_timing_is_said_to_be_and_not_ranked(subtests):
    for disturbed in ("baseline", "x"):
        with subtests.test(disturbed=disturbed):
            share = {"baseline": 0.0, "x": 0.0, disturbed: 0.4}
            baseline = twice(contended_share=share["baseline"])
            table = table_of(*baseline, *twice("x", peak=90, contended_share=share["x"]))
            assert table.loc["x", "timing"] == "disturbed"
            assert math.isnan(table.loc["x", "speed_ratio"])
            assert "disturbed" in comparison_text(table)


def test_what_is_not_ranked_is_named_with_its_reason():
    runs = [
        record(), record("x", status=Status.FAILED, error="first"), record("x", status=Status.OOM, error="no memory"),
        record("y", status=Status.KILLED, error="gone"), record("y"),
        record("elsewhere", device_name="EPYC", status=Status.FAILED, error="other device"),
    ]  # fmt: skip
    frame = to_frame(runs)
    rest = list_unranked(frame)
    assert rest.reset_index().values.tolist() == [["x", "oom", "no memory"]]
    assert "\nnot ranked: x: oom. no memory" in comparison_text(compare(frame), rest)


def test_seeds_become_one_row_with_their_spread():
    table = table_of(*(record(seed=s, loss=4 + s / 10, speed=1000 + s) for s in range(3)))
    (row,) = table.to_dict("records")
    assert row["seeds"] == 3
    assert row["held_out_loss"] == pytest.approx(4.1)
    assert row["held_out_loss_spread"] == pytest.approx(0.2)
    assert row["tokens_per_s"] == 1001


def test_runs_under_a_memory_cap_are_left_out():
    table = table_of(record(peak=200), record(peak=200, speed=None, memory_cap_bytes=300), record("lora", peak=50))
    assert table.loc["baseline", "tokens_per_s"] == 1000
    with pytest.raises(ConfigurationError, match="none of them a baseline"):
        table_of(record(memory_cap_bytes=300), record("lora"))


def test_a_difference_inside_the_spread_is_a_tie():
    baseline = [record(seed=s, loss=4 + s / 10) for s in range(3)]
    verdicts = {4.1: "same", 4.19: "tie", 4.01: "tie", 4.5: "worse", 3.5: "better"}
    others = {loss: [record("x", seed=s, loss=loss) for s in range(3)] for loss in verdicts}
    assert {loss: table_of(*baseline, *runs).loc["x", "loss_verdict"] for loss, runs in others.items()} == verdicts


NO_SEARCH = {
    "nothing": {},
    "one": {"0.001": 1.0},
    "two": {"0.0005": 2.0, "0.001": 1.0},
    "the best at the edge": {"0.0001": 3.0, "0.0005": 2.0, "0.001": 1.0},
}


def test_without_a_search_there_is_no_verdict(subtests):
    for label, (name, tried) in product(("baseline", "x"), NO_SEARCH.items()):
        with subtests.test(label=label, tried=name):
            rates = {"baseline": SEARCHED, "x": SEARCHED, label: tried}
            baseline = twice(rates_tried=rates["baseline"], loss=4.0)
            table = table_of(*baseline, *twice("x", rates_tried=rates["x"], loss=3.0))
            assert table.loc["x", "loss_verdict"] == "not searched"
            assert "not searched" in comparison_text(table)


def test_of_several_rates_the_searched_one_counts_and_then_the_newest():
    at = {"rates_tried": {}, "learning_rate": 2e-3}
    runs = [record(loss=3.0), record(loss=5.0, **at), record("x"), record("y", rates_tried={}), record("y", **at)]
    table = table_of(*runs)
    assert table["learning_rate"].to_dict() == {"baseline": 1e-3, "x": 1e-3, "y": 2e-3}
    assert table.loc["baseline", "held_out_loss"] == 3.0


def test_one_seed_cannot_tell_a_difference():
    table = table_of(record(), record("x", loss=4.2))
    assert table.loc["x", "loss_verdict"] == "?"
    assert math.isnan(table.loc["x", "held_out_loss_spread"])


def test_only_finished_runs_are_ranked(subtests):
    for status in [status for status in Status if status is not Status.OK]:
        with subtests.test(status=status):
            table = table_of(record(), record("x", peak=1, loss=0.0, status=status))
            assert list(table.index) == ["baseline"]


def test_a_spread_must_be_known_on_both_sides():
    for seeds in ((1, 3), (3, 1)):
        runs = [record(seed=s, loss=4 + s / 100) for s in range(seeds[0])]
        runs += [record("x", seed=s, loss=4.2 + s / 100) for s in range(seeds[1])]
        assert table_of(*runs).loc["x", "loss_verdict"] == "?", seeds


def test_losses_and_speeds_are_shown_with_half_their_spread():
    runs = [record(seed=s, speed=1000, loss=4 + s / 100) for s in range(2)]
    runs += [record("x", seed=s, peak=90, speed=500 + 200 * s, loss=4 + s / 100) for s in range(2)]
    text = comparison_text(table_of(*runs))
    assert "4.005 ± 0.005" in text
    assert "0.60 ± 0.10×" in text


def test_runs_too_short_to_time_compare_all_the_same():
    table = table_of(record(speed=None), record("x", peak=10, speed=None))
    row = next(line for line in comparison_text(table).splitlines() if line[0] == "x")
    assert row.split()[-2:] == ["–", "–"]


def test_the_newest_run_of_a_seed_counts():
    assert table_of(record(peak=100), record(peak=90)).loc["baseline", "peak_allocated_bytes"] == 90


def test_what_does_not_compare_is_left_out(subtests):
    for fact, value in (
        ("model", "gpt2"),
        ("memory_source", "cuda-allocator"),
        ("data_sha256", "another"),
        ("device_kind", "cuda"),
        ("device_name", "EPYC"),
        ("threads", 8),
        ("threads", None),
        ("world_size", 2),
    ):
        with subtests.test(fact=fact, value=value):
            other = {fact: value}
            table = table_of(record("x", peak=1, **other), record(), record("y", peak=2))
            assert list(table.index) == ["y", "baseline"]
            newer = table_of(record(), record("y"), record("x", **other), record(**other))
            assert set(newer.index) == {"x", "baseline"}


def test_the_group_of_the_newest_run_is_taken_if_it_has_a_baseline():
    other = {"model": "gpt2"}
    assert set(table_of(record(), record(**other), record("x")).index) == {"x", "baseline"}
    assert set(table_of(record(), record("y"), record("x", **other)).index) == {"y", "baseline"}


def test_without_a_baseline_there_is_nothing_to_compare_with():
    with pytest.raises(ConfigurationError, match="1 finished runs, none of them a baseline. Run one first"):
        table_of(record("lora"))
    with pytest.raises(ConfigurationError, match="none of them a baseline"):
        compare(to_frame([]))


def test_the_text_names_model_device_and_source():
    table = table_of(record(peak=2**20), record("lora", peak=2**19))
    text = comparison_text(table)
    for words in (
        "1.0 MiB",
        "512 KiB",
        "50%",
        "gpt2-tiny on shakespeare",
        "cpu-tracker on Xeon (cpu, 2 threads)",
        "1 seed.",
    ):
        assert words in text
    assert caption(table) in text


def test_missing_dropout_is_one_group_and_a_number_another():
    plain, dropped = record(), record("x")
    dropped.recipe_settings["dropout"] = 0.5
    assert list(table_of(dropped, plain).index) == ["baseline"]
    assert isinstance(table_of(plain), pd.DataFrame)
