import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from workbench.errors import ConfigurationError
from workbench.recipe import Recipe
from workbench.records import checkpoints, store
from workbench.records.record import Record, Status, read_all
from workbench.techniques import Lora


def new(**changes):
    return Record.start(Recipe(**changes), device_kind="cpu", threads=2, data_sha256="a")


def statuses(folder):
    return [record.status for record in read_all(folder)]


def test_a_run_of_this_process_is_alive_until_it_ends(tmp_path):
    record = store.begin(new(), tmp_path)
    assert record.owner["pid"] == os.getpid()
    assert store.mark_killed(tmp_path) == []
    store.end(replace(record, status=Status.OK), tmp_path)
    assert statuses(tmp_path) == [Status.OK]


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    owner = store._process(done.pid)
    done.wait()
    replace(new(), owner=owner).save(tmp_path)
    (killed,) = store.mark_killed(tmp_path)
    assert killed.error == "the process ended without a word"
    assert statuses(tmp_path) == [Status.KILLED]
    assert store.mark_killed(tmp_path) == []


def test_the_number_of_the_process_may_belong_to_another_one_now(tmp_path):
    replace(new(), owner=store._process(os.getppid()) | {"began": 12.0}).save(tmp_path)
    assert len(store.mark_killed(tmp_path)) == 1


@pytest.mark.parametrize("owner", [store._process(os.getppid()), {"host": "elsewhere", "pid": 1, "began": 0.0}])
def test_runs_of_a_second_notebook_or_machine_are_left_alone(tmp_path, owner):
    replace(new(), owner=owner).save(tmp_path)
    assert store.mark_killed(tmp_path) == []
    assert statuses(tmp_path) == [Status.RUNNING]


def test_a_run_of_this_process_that_nobody_executes_any_more_is_dead(tmp_path):
    replace(new(), owner=store._process(os.getpid())).save(tmp_path)
    assert len(store.mark_killed(tmp_path)) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="nothing can be written into .*WORKBENCH_RUNS"):
        store.begin(new(), tmp_path / "file")


def test_a_record_that_cannot_be_written_in_the_end_is_printed(tmp_path, monkeypatch, capsys):
    record = replace(store.begin(new(), tmp_path), status=Status.OK, held_out_loss=3.25)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    returned = store.end(record, tmp_path)
    (told,) = returned.warnings
    assert told.startswith(
        f"the record was printed instead of written: nothing can be written into {tmp_path} (No space"
    )
    assert told.endswith("Free some space, or set WORKBENCH_RUNS to another folder.")
    printed = capsys.readouterr().err
    assert f"Keep these lines as {record.id}.json" in printed
    assert json.loads(printed[printed.index("{") :])["held_out_loss"] == 3.25


@pytest.fixture
def unfinished(tmp_path):
    """An interrupted run with a whole checkpoint after step 4."""

    def made(status=Status.INTERRUPTED, **changes):
        record = replace(new(**changes), status=status)
        record.save(tmp_path)
        aside = tmp_path / "aside"
        aside.mkdir()
        (aside / "weights").write_text("w")
        checkpoints.commit(aside, store.checkpoint_folder(record, tmp_path) / "checkpoint-4", {"tokens_seen": 4})
        return record

    (tmp_path / "x").mkdir()
    return made


@pytest.fixture
def resumable(tmp_path):
    def ask(recipe=Recipe(), **facts):  # noqa: B008 - frozen
        known = {"device_kind": "cpu", "threads": 2, "data_sha256": "a", **facts}
        return store.resumable(Record.start(recipe, model=recipe.model, **known), tmp_path)

    return ask


@pytest.mark.parametrize("status", store.UNFINISHED)
def test_the_newest_unfinished_run_of_the_recipe_is_resumed(unfinished, resumable, status):
    unfinished(status)
    newest = unfinished(status)
    assert resumable() == newest


@pytest.mark.parametrize("status", [Status.OK, Status.RUNNING, Status.DIVERGED, Status.UNAVAILABLE])
def test_what_ended_or_still_runs_is_not(unfinished, resumable, status):
    unfinished(status)
    assert resumable() is None


def test_without_a_checkpoint_there_is_nothing_to_resume(resumable, tmp_path):
    replace(new(), status=Status.KILLED).save(tmp_path)
    assert resumable() is None


@pytest.mark.parametrize(
    ("recipe", "facts", "words"),
    [
        (Recipe(steps=31), {}, "steps was 12 and is now 31"),
        (Recipe(seed=1, learning_rate=1e-3), {}, "learning_rate was None and is now 0.001; seed was 0 and is now 1"),
        (Recipe() | Lora(rank=2), {}, "techniques was {} and is now {'lora': {'rank': 2"),
        (Recipe(), {"data_sha256": "b"}, "data_sha256 was 'a' and is now 'b'"),
        (Recipe(), {"device_kind": "cuda"}, "device_kind was 'cpu' and is now 'cuda'"),
        (Recipe(), {"threads": 8}, "threads was 2 and is now 8"),
    ],
    ids=["steps", "two", "technique", "text", "device", "threads"],
)
def test_another_recipe_or_text_is_refused_with_the_difference(unfinished, resumable, recipe, facts, words):
    record = unfinished()
    with pytest.raises(ConfigurationError) as caught:
        resumable(recipe, **facts)
    assert f"resume: the unfinished run {record.id} is another one: {words}" in str(caught.value)
    assert "or run without resume" in str(caught.value)


def test_one_of_several_unfinished_runs_fits(unfinished, resumable):
    mine = unfinished()
    unfinished(steps=31)
    assert resumable() == mine
