"""What a lesson calls: records by a toggle, a table of them, and committed tables that say what they were made of."""

import inspect
from dataclasses import replace

import pytest

from tests.advise.test_compare import record as timed
from workbench import lesson
from workbench.base.errors import ConfigurationError, OutOfMemoryError, UnavailableError
from workbench.journal.record import Record, Status
from workbench.lesson import given, measured_on_h100, staircase, table, toggle, verdicts
from workbench.lessons.staircase import numerics_of, steps_of
from workbench.techniques import GradientCheckpointing, Lora, Numerics

MIB = 2**20


@pytest.fixture
def ran(monkeypatch, recipe):
    """Runs that only leave a record, and which recipes they were of."""
    wanted = []

    def run(recipe, **_):
        wanted.append(recipe.label)
        return record_of(recipe)

    monkeypatch.setattr("workbench.run", run)
    return wanted


def record_of(recipe, **facts):
    made = {
        "id": "id",
        "created_at": "2026-11-27T00:00:00+00:00",
        "status": Status.OK,
        "recipe_settings": recipe.to_dict(),
        "recipe_id": recipe.id,
        "label": recipe.label,
        "peak_allocated_bytes": 100 * MIB,
        "maximum_by_category": {"activations": 50 * MIB, "logits_and_loss": 20 * MIB},
        "losses": [3.0, 2.0],
        "held_out_loss": 2.12341,
    }
    return Record(**{**made, **facts})


def test_off_and_on_and_several_together(ran, recipe):
    labels = [record.label for record in toggle(recipe, Lora(), (Lora(), GradientCheckpointing()))]
    assert labels == ran == ["baseline", "lora", "gradient_checkpointing + lora"]


def test_what_cannot_be_run_here_has_a_record_that_says_so(monkeypatch, recipe, runs_folder):
    def run(recipe, **_):
        unavailable = recipe.label == "lora"
        status = Status.UNAVAILABLE if unavailable else Status.OOM
        replace(Record.start(recipe), status=status, error="lora: it needs a GPU").save()
        raise UnavailableError("no") if unavailable else OutOfMemoryError("no")

    monkeypatch.setattr("workbench.run", run)
    off, on = toggle(recipe, Lora())
    assert (off.status, on.status) == (Status.OOM, Status.UNAVAILABLE)
    assert table([off, on]).loc["LoRA", "why there is no more"] == "lora: it needs a GPU"


def test_what_left_no_record_is_raised(monkeypatch, recipe, runs_folder):
    """An older record of the same recipe is another run's."""
    replace(Record.start(recipe), status=Status.FAILED, error="long ago").save()

    def run(recipe, **_):
        raise UnavailableError("a report wants a program that is not here")

    monkeypatch.setattr("workbench.run", run)
    with pytest.raises(UnavailableError, match="a program"):
        toggle(recipe)


def test_techniques_that_do_not_go_together_are_refused(ran, recipe):
    with pytest.raises(ConfigurationError):
        toggle(recipe, (Lora(), Lora()))
    assert not ran


def test_the_table_is_a_plain_frame_with_the_baseline_as_the_measure(recipe):
    off = record_of(recipe)
    on = record_of(recipe | GradientCheckpointing(), peak_allocated_bytes=60 * MIB)
    rounded = record_of(recipe | Lora(), losses=[3.0, 2.000001])
    shown = table([on, off, rounded])
    assert list(shown.columns) == [
        "peak MiB",
        "activations MiB",
        "logits and loss MiB",
        "saved",
        "held-out loss",
        "losses differ by",
    ]
    assert list(shown["saved"]) == ["40%", "0%", "0%"]
    assert list(shown["losses differ by"]) == ["0", "0", "1e-06"]
    assert shown.loc["baseline", "held-out loss"] == 2.1234


def test_every_seed_is_compared_with_its_own_baseline(recipe):
    other_seed = replace(recipe, seed=1)
    records = [
        record_of(recipe),
        record_of(other_seed, losses=[5.0, 4.0], peak_allocated_bytes=200 * MIB),
        record_of(recipe | GradientCheckpointing(), peak_allocated_bytes=50 * MIB),
        record_of(other_seed | GradientCheckpointing(), losses=[5.0, 4.0], peak_allocated_bytes=50 * MIB),
    ]
    shown = table(records)
    assert list(shown["losses differ by"]) == ["0"] * 4
    assert list(shown["saved"]) == ["0%", "0%", "50%", "75%"]


def test_several_seeds_of_a_baseline_that_cannot_run_are_not_tried(monkeypatch, recipe, runs_folder):
    def run(recipe, **_):
        replace(Record.start(recipe), status=Status.UNAVAILABLE, error="no GPU").save()
        raise UnavailableError("no GPU")

    monkeypatch.setattr("workbench.run", run)
    assert [record.status for record in toggle(recipe, Lora(), seeds=3)] == [Status.UNAVAILABLE] * 2


def test_categories_can_be_chosen(recipe):
    off = record_of(recipe, maximum_by_category={"optimizer_states": 30 * MIB})
    assert list(table([off], "optimizer_states").columns)[1:2] == ["optimizer states MiB"]


def test_where_nothing_was_computed_no_loss_is_made_up(recipe):
    off = record_of(recipe, losses=[], held_out_loss=None)
    assert table([off])["losses differ by"].item() == "no values"
    assert table([off])["held-out loss"].item() == ""


def test_other_batches_are_no_difference(recipe):
    longer = replace(record_of(recipe | Lora()), losses=[3.0, 2.0, 1.0])
    assert table([record_of(recipe), longer]).loc["LoRA", "losses differ by"] == "other steps"


def test_what_an_h100_measured_and_what_was_judged():
    shown = measured_on_h100("gradient_checkpointing")
    assert list(shown.index) == ["baseline", "gradient checkpointing"]
    assert list(measured_on_h100("baseline").index) == list(verdicts("baseline").loc[12].index) == ["baseline"]
    assert list(shown["peak GiB"]) == [14.1, 6.4]
    assert shown.loc["gradient checkpointing", "speed"] == "0.80×"
    assert set(verdicts("lora")["against the baseline"]) == {"", "worse"}
    assert "held-out loss, mean of 3 seeds" in verdicts()
    for function in (measured_on_h100, verdicts):
        with pytest.raises(KeyError):
            function("no such recipe")


def test_the_stairs_are_those_that_nothing_smaller_outruns():
    rows = lesson._on_h100()
    same = list(steps_of(rows, (Numerics.EXACT,)).index)
    assert same == ["gradient_accumulation(steps=8)", "gradient_accumulation", "chunked_cross_entropy", "fused_gelu"]
    assert steps_of(rows, (Numerics.EXACT, Numerics.APPROXIMATE)).index[-1] == "pure_bf16"
    gib, ratio = rows.loc["fused_gelu", ["peak_allocated_bytes", "speed_ratio"]]
    place = f"fused GELU (same loss), {gib / 2**30:.1f} GiB, {ratio:.2f}×"
    assert place in staircase().description


def test_one_run_each_says_nothing_of_speed():
    runs = [timed(seed=seed) for seed in range(2)]
    assert "baseline (same loss)" in staircase(runs).description
    assert staircase(runs[:1]).description == "no speed that was timed twice on record"


def test_an_unknown_speed_beats_nothing():
    rows = lesson._on_h100()
    rows.loc["gradient_accumulation(steps=8)", "speed_ratio"] = None
    labels = list(steps_of(rows, (Numerics.EXACT,)).index)
    assert "gradient_accumulation(steps=8)" not in labels
    assert "gradient_accumulation" in labels


def test_a_set_does_to_the_loss_what_its_boldest_technique_does():
    assert numerics_of("") is Numerics.EXACT
    assert numerics_of("gradient_checkpointing+mixed_precision") is Numerics.APPROXIMATE
    assert numerics_of("lora+mixed_precision") is Numerics.DIFFERENT


def test_given_one_the_best_exact_one_is_added():
    shown = given("mixed_precision")
    beside = shown.loc["mixed precision"]
    assert beside["add"] == "gradient accumulation"
    assert int(beside["saved together"].rstrip("%")) > int(beside["saved alone"].rstrip("%"))


def test_all_that_a_lesson_may_import_is_there():
    for name in (*lesson.__all__, *lesson.ELSEWHERE):
        assert getattr(lesson, name) is not None
    for name in lesson.pictures.__all__:
        assert inspect.isfunction(getattr(lesson, name))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        lesson.nope  # noqa: B018
