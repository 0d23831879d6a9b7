import dataclasses
import json
import os
import stat
import time
from dataclasses import replace

import pandas as pd
import pytest

from workbench.advise.frame import records
from workbench.base.categories import Category, Phase
from workbench.base.errors import ConfigurationError
from workbench.base.paths import versions
from workbench.journal.record import Record, Status, find_equal, read_all
from workbench.recipe import Recipe
from workbench.techniques import Lora

FACTS = {"device_kind": "cpu", "device_name": "a processor", "threads": 2, "data_sha256": "abc"}


def finished(recipe=None, **changes):
    """A record of a run that went well."""
    measured = {
        "status": Status.OK, "dtype": "float32", "learning_rate": 1e-3, "micro_batch_size": 8,
        "gradient_accumulation_steps": 1, "steps_done": 3, "tokens_seen": 3072, "parameters": 10,
        "trainable_parameters": 10, "memory_source": "cpu-tracker", "before_bytes": 0, "peak_allocated_bytes": 100,
        "peak_phase": "backward", "by_category": {"weights": 60, "gradients": 40},
        "by_phase": {"forward": 90, "backward": 100}, "losses": [3.0, 2.0, 1.5], "held_out_loss_before": 3.5,
        "held_out_loss": 2.5, "timed_steps": 1, "step_time_s": 0.5, "tokens_per_s": 2048.0,
    }  # fmt: skip
    record = Record.start(recipe or Recipe(model="gpt2-tiny"), **FACTS)
    time.sleep(0.001)  # the next record starts later, also on a coarse clock
    return replace(record, **{**measured, **changes})


def test_a_record_starts_as_running_with_what_was_asked_and_with_what():
    recipe = Recipe(model="gpt2-tiny") | Lora(rank=4)
    record = Record.start(recipe, **FACTS)
    assert record.status is Status.RUNNING
    assert (record.recipe_id, record.label) == (recipe.id, "lora(rank=4)")
    assert record.recipe == recipe
    assert record.id.endswith(recipe.id)
    assert {"python", "workbench", "torch", "transformers"} <= set(record.versions)
    assert record.peak_allocated_bytes is None
    assert record.losses == []


def test_saved_and_read_it_is_the_same(tmp_path):
    record = finished()
    path = record.save(tmp_path)
    assert path == tmp_path / f"{record.id}.json"
    assert Record.read(path) == record
    assert Record.read(path).status is Status.OK


def test_by_default_it_goes_where_the_environment_says(runs_folder):
    assert finished().save().parent == runs_folder


def test_nothing_else_is_left_in_the_folder(tmp_path):
    record = finished()
    record.save(tmp_path)
    record.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{record.id}.json"]


def test_a_kill_before_the_renaming_leaves_the_earlier_record_whole(tmp_path, monkeypatch):
    record = finished(status=Status.RUNNING)
    path = record.save(tmp_path)
    before = path.read_bytes()

    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            replace(record, status=Status.OK).save(tmp_path)
    assert path.read_bytes() == before
    assert read_all(tmp_path) == [record]


def test_a_full_disk_leaves_no_half_file_behind(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        finished().save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_can_be_read_by_others_like_any_file(tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    record = finished().save(tmp_path / "runs")
    assert stat.S_IMODE(record.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


NO_RECORDS = (
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"status": "ok"}',
    '{"status": "fine"}',
    '{"id": 1, "status": "ok", "colour": 2}',
    "\x00",
)


def test_what_is_no_record_is_refused_by_name(tmp_path, subtests):
    cut_off = finished().save(tmp_path).read_text()[:-20]
    path = tmp_path / "broken.json"
    for text in (*NO_RECORDS, cut_off):
        path.write_text(text)
        refused = pytest.raises(ConfigurationError, match=r"broken.json is not a record .* Move it away")
        with subtests.test(text=text[:40]), refused:
            Record.read(path)


def test_a_broken_file_is_named_and_the_others_are_read(tmp_path, capsys):
    kept = finished()
    kept.save(tmp_path)
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "latin.json").write_bytes(b'{"id": "\xe9"}')
    (tmp_path / "notes.txt").write_text("mine")
    assert read_all(tmp_path) == [kept]
    warned = capsys.readouterr().err
    assert "a.json" in warned
    assert "latin.json" in warned
    assert "notes" not in warned


def test_records_come_oldest_first(tmp_path):
    made = [finished() for _ in range(3)]
    for record in reversed(made):
        record.save(tmp_path)
    assert [record.id for record in read_all(tmp_path)] == [record.id for record in made]


# ---- the table ----


def test_an_empty_table_has_the_same_types(tmp_path):
    empty = records(tmp_path / "nothing here")
    finished().save(tmp_path)
    full = records(tmp_path)
    assert len(empty) == 0
    assert list(empty.columns) == list(full.columns)
    assert empty.dtypes.equals(full.dtypes)


COLUMNS = {
    "Int64": "peak_allocated_bytes peak_reserved_bytes weights_bytes forward_peak_bytes steps seed timed_steps "
    "trainable_parameters threads world_size",
    "Float64": "held_out_loss tokens_per_s learning_rate dropout",
    "string": "status label techniques model corpus device device_kind",
    "boolean": "longest_first",
}


def test_columns_are_typed_also_when_every_value_is_missing(tmp_path, subtests):
    Record.start(Recipe(), **FACTS).save(tmp_path)
    frame = records(tmp_path)
    for kind, columns in COLUMNS.items():
        for column in columns.split():
            with subtests.test(column=column):
                assert str(frame[column].dtype) == kind


def test_one_row_a_run_with_units_in_the_names(tmp_path):
    finished(Recipe(model="gpt2-tiny", seed=4) | Lora()).save(tmp_path)
    frame = records(tmp_path)
    row = frame.iloc[0]
    assert len(frame) == 1
    assert (row["techniques"], row["seed"], row["status"]) == ("lora", 4, "ok")
    assert (row["weights_bytes"], row["gradients_bytes"], row["backward_peak_bytes"]) == (60, 40, 100)
    assert pd.isna(row["evaluation_peak_bytes"])
    assert isinstance(frame["created_at"].dtype, pd.DatetimeTZDtype)
    assert {f"{category}_bytes" for category in Category} | {f"{phase}_peak_bytes" for phase in Phase} <= set(frame)


def test_parquet_and_back(tmp_path):
    finished().save(tmp_path)
    Record.start(Recipe(), **FACTS).save(tmp_path)
    frame = records(tmp_path)
    frame.to_parquet(tmp_path / "runs.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "runs.parquet"), frame)


def test_csv_and_back(tmp_path):
    finished().save(tmp_path)
    Record.start(Recipe(), **FACTS).save(tmp_path)
    frame = records(tmp_path)
    frame.to_csv(tmp_path / "runs.csv", index=False)
    again = pd.read_csv(tmp_path / "runs.csv", dtype=dict(frame.drop(columns="created_at").dtypes))
    texts = list(frame.select_dtypes("string"))  # CSV knows no difference between an empty text and none
    again = again.assign(**again[texts].fillna(""), created_at=pd.to_datetime(again["created_at"], utc=True))
    pd.testing.assert_frame_equal(again, frame.assign(**frame[texts].fillna("")), check_dtype=False)


# ---- reuse ----


def equal_to(recipe, folder, **facts):
    return find_equal(Record.start(recipe, model=recipe.model, **facts), folder=folder)


def test_the_newest_good_record_is_found(tmp_path):
    recipe = Recipe(model="gpt2-tiny")
    older, newer = finished(recipe), finished(recipe)
    failed = finished(recipe, status=Status.FAILED)
    for record in (failed, newer, older):
        record.save(tmp_path)
    assert equal_to(recipe, tmp_path, **FACTS) == newer


def test_only_ok_is_reused(tmp_path, subtests):
    for status in Status:
        with subtests.test(status=status):
            finished(status=status).save(tmp_path / status)
            equal = equal_to(Recipe(model="gpt2-tiny"), tmp_path / status, **FACTS)
            assert (equal is not None) is (status is Status.OK)


def test_another_world_text_or_recipe_is_not_reused(tmp_path, subtests):
    recipe = Recipe(model="gpt2-tiny")
    record = finished(recipe)
    record.save(tmp_path)
    assert equal_to(recipe, tmp_path, **FACTS) == record
    for fact in (*FACTS, "world_size"):
        with subtests.test(fact=fact):
            assert equal_to(recipe, tmp_path, **{**FACTS, fact: "another"}) is None
    for change in ({"seed": 1}, {"steps": 41}, {"techniques": (Lora(),)}):
        with subtests.test(change=change):
            assert equal_to(replace(recipe, **change), tmp_path, **FACTS) is None


def test_capped_and_uncapped_runs_do_not_stand_for_each_other(tmp_path):
    recipe, capped = Recipe(model="gpt2-tiny"), finished(memory_cap_bytes=1000)
    capped.save(tmp_path)
    assert equal_to(recipe, tmp_path, **FACTS) is None
    assert equal_to(recipe, tmp_path, memory_cap_bytes=999, **FACTS) is None
    assert equal_to(recipe, tmp_path, memory_cap_bytes=1000, **FACTS) == capped
    plain = finished()
    plain.save(tmp_path)
    assert equal_to(recipe, tmp_path, **FACTS) == plain
    assert equal_to(recipe, tmp_path, memory_cap_bytes=1000, **FACTS) == capped


def test_another_version_is_not_reused(tmp_path):
    finished(versions={**versions(), "torch": "1.13.0"}).save(tmp_path)
    assert equal_to(Recipe(model="gpt2-tiny"), tmp_path, **FACTS) is None


def test_the_file_is_plain_json_with_every_field(tmp_path):
    data = json.loads(
        finished().save(tmp_path).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    names = {field.name for field in dataclasses.fields(Record)}
    assert set(data) == names - {"recipe_settings"} | {"recipe"}
