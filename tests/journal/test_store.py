import errno
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from test_checkpoints import CONTENTS, SEEN

from workbench.base.errors import ConfigurationError
from workbench.base.paths import ROOT
from workbench.journal import checkpoints, store
from workbench.journal.record import Record, Status, read_all
from workbench.recipe import Recipe
from workbench.techniques import Lora


def new(**changes):
    return Record.start(Recipe(**changes), device_kind="cpu", threads=2, data_sha256="a")


def statuses(folder):
    return [record.status for record in read_all(folder)]


def process(pid):
    """As a record has its owner: a later process of the same number has another start."""
    return store._process(pid)


def is_alive(record, folder):
    """Whether the record is left as it is, because its process may live."""
    place = folder / record.id
    record.save(place)
    return store.mark_killed(place) == []


def test_a_run_of_this_process_is_alive_until_it_ends(tmp_path):
    record = store.begin(new(), tmp_path)
    assert record.owner == process(os.getpid())
    assert store.mark_killed(tmp_path) == []
    store.end(replace(record, status=Status.OK), tmp_path)
    assert statuses(tmp_path) == [Status.OK]


def test_a_run_whose_process_is_gone_was_killed(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    owner = process(done.pid)
    done.wait()
    replace(new(), owner=owner).save(tmp_path)
    (killed,) = store.mark_killed(tmp_path)
    assert killed.error == "the process ended without a word"
    assert statuses(tmp_path) == [Status.KILLED]
    assert store.mark_killed(tmp_path) == []


def test_what_a_kill_left_of_a_checkpoint_is_gone_after_the_next_start(tmp_path):
    record = replace(new(), owner=process(os.getppid()) | {"start": "12.0"})
    record.save(tmp_path)
    aside = store.checkpoint_folder(record, tmp_path) / checkpoints.ASIDE
    (aside / "checkpoint-1").mkdir(parents=True)
    (aside.parent / "checkpoint-0").mkdir()
    store.mark_killed(tmp_path)
    assert [path.name for path in aside.parent.iterdir()] == ["checkpoint-0"]


def test_it_is_gone_too_where_another_user_has_marked_the_run(tmp_path, monkeypatch):
    """He can write beside his own records, and not remove what lies in the folders of others."""
    dead = replace(new(), owner=process(os.getppid()) | {"start": "12.0"})
    going_on = replace(new(), owner=process(os.getppid()))
    for record in (dead, going_on):
        record.save(tmp_path)
        (store.checkpoint_folder(record, tmp_path) / checkpoints.ASIDE).mkdir(parents=True)
    with monkeypatch.context() as another_user:
        another_user.setattr("shutil.rmtree", lambda *_, **__: None)
        assert [record.id for record in store.mark_killed(tmp_path)] == [dead.id]
    store.mark_killed(tmp_path)
    assert [path.parts[-3] for path in tmp_path.glob(f"*/*/{checkpoints.ASIDE}")] == [going_on.id]


def test_the_empty_folder_of_a_run_that_was_killed_is_gone_and_that_of_a_run_that_goes_on_stays(tmp_path):
    dead = replace(new(), owner=process(os.getppid()) | {"start": "12.0"})
    killed = replace(new(), status=Status.KILLED)
    going_on = replace(new(), owner=process(os.getppid()))
    with_checkpoint = replace(new(), owner=process(os.getppid()) | {"start": "12.0"})
    before_its_first = replace(new(), owner=process(os.getppid()) | {"start": "12.0"})
    for record in (dead, killed, going_on, with_checkpoint, before_its_first):
        record.save(tmp_path)
        (tmp_path / record.id).mkdir()  # the Trainer makes it, and the folder for checkpoints with the first of them
    for record in (dead, killed, with_checkpoint):
        store.checkpoint_folder(record, tmp_path).mkdir()
    (store.checkpoint_folder(with_checkpoint, tmp_path) / "checkpoint-1").mkdir()
    (tmp_path / "nobody's").mkdir()
    store.mark_killed(tmp_path)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {going_on.id, with_checkpoint.id, "nobody's"}


def test_records_that_another_user_lets_nobody_read_are_left_out_in_one_line(tmp_path, monkeypatch, capsys):
    records = [replace(new(), status=Status.OK) for _ in range(3)]
    for record in records:
        record.save(tmp_path)

    def read_text(path, *args, read=Path.read_text, **kwargs):
        if path.stem != records[1].id:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert [record.id for record in read_all(tmp_path)] == [records[1].id]
    assert capsys.readouterr().err.count("are other users', who let nobody read them") == 1


def test_the_lock_is_of_all_users_of_the_folder(tmp_path):
    replace(new(), owner=process(os.getppid()) | {"start": "12.0"}).save(tmp_path)
    store.mark_killed(tmp_path)
    assert (tmp_path / store.LOCK).stat().st_mode & 0o666 == 0o666


def test_of_many_records_only_those_are_read_that_are_needed(tmp_path, monkeypatch):
    record = replace(new(), status=Status.OK)
    for n in range(50):
        replace(record, id=f"20260101T{n:06}").save(tmp_path)
    replace(record, id="20260101T000020", status=Status.RUNNING).save(tmp_path)
    read = []
    monkeypatch.setattr(Record, "read", lambda path, read_one=Record.read: read.append(path) or read_one(path))
    assert [one.id for one in read_all(tmp_path, newest=2)] == ["20260101T000048", "20260101T000049"]
    assert len(read) == 2
    store.mark_killed(tmp_path)
    assert {path.stem for path in read[2:]} == {"20260101T000020"}


def test_the_number_of_the_process_may_belong_to_another_one_now(tmp_path):
    replace(new(), owner=process(os.getppid()) | {"start": "12.0"}).save(tmp_path)
    assert len(store.mark_killed(tmp_path)) == 1


def test_runs_of_a_second_notebook_or_machine_are_left_alone(tmp_path):
    for owner in (process(os.getppid()), {"host": "elsewhere", "pid": 1, "start": "0"}):
        replace(new(), owner=owner).save(tmp_path)
    assert store.mark_killed(tmp_path) == []
    assert statuses(tmp_path) == [Status.RUNNING] * 2


def test_a_run_of_this_process_that_nobody_executes_any_more_is_dead(tmp_path):
    replace(new(), owner=process(os.getpid())).save(tmp_path)
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
    (warning,) = returned.warnings
    assert warning.startswith(
        f"the record was printed instead of written: nothing can be written into {tmp_path} (No space"
    )
    assert warning.endswith("Free some space, or set WORKBENCH_RUNS to another folder.")
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
        for name, data in CONTENTS.items():
            (aside / name).write_bytes(data)
        checkpoints.commit(aside, store.checkpoint_folder(record, tmp_path) / "checkpoint-4", SEEN)
        return record

    (tmp_path / "x").mkdir()
    return made


@pytest.fixture
def resumable(tmp_path):
    def ask(recipe=Recipe(), **facts):  # noqa: B008 - frozen
        known = {"device_kind": "cpu", "threads": 2, "data_sha256": "a", **facts}
        return store.resumable(Record.start(recipe, model=recipe.model, **known), tmp_path)

    return ask


HERE, PARENT = platform.node(), os.getppid()
DEAD = (
    {},  # nobody ever claimed it
    {"host": HERE, "pid": 2**40, "start": "0"},
    {"host": HERE, "pid": PARENT, "start": "12.0"},  # its number belongs to another process now
)
NO_OWNERS = (
    None, [os.getpid()], "me", {"host": HERE}, {"pid": 2**30, "start": "0"}, {"host": HERE, "pid": PARENT},
    {"host": HERE, "pid": -5, "start": "0"}, {"host": HERE, "pid": 0, "start": "0"},
    {"host": HERE, "pid": 2**70, "start": "0"}, {"host": HERE, "pid": PARENT, "start": "-inf"},
    {"host": HERE, "pid": PARENT, "start": "nan"}, {"host": HERE, "pid": PARENT, "start": "yesterday"},
    {"host": HERE, "pid": PARENT, "start": None}, {"host": HERE, "pid": PARENT, "start": 12.0},
    {"host": HERE, "pid": str(PARENT), "start": "0"},
    {"host": HERE, "pid": True, "start": "0"}, {"host": HERE, "pid": 1.5, "start": "0"},
    {"host": HERE, "pid": [1], "start": "0"}, {"host": None, "pid": 1, "start": "0"},
    {"host": 7, "pid": 1, "start": "0"}, {"host": "elsewhere", "pid": "many", "start": {}},
)  # fmt: skip


def test_an_odd_owner_is_no_reason_to_fail_nor_to_call_a_run_dead_that_may_live(tmp_path, subtests):
    for owner in (*DEAD, *NO_OWNERS):
        with subtests.test(owner=owner):
            record = new()
            place = tmp_path / record.id
            path = record.save(place)
            text = json.dumps({**json.loads(path.read_text()), "status": "running", "owner": owner})
            path.write_text(text)
            if owner in DEAD:
                assert [killed.id for killed in store.mark_killed(place)] == [record.id]
                assert statuses(place) == [Status.KILLED]
            else:  # no record: it is named and left alone
                assert store.mark_killed(place) == []
                assert path.read_text() == text


def test_a_process_that_may_not_be_looked_at_is_alive(tmp_path, monkeypatch):
    def denied(*_):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "create_time", denied)
    assert is_alive(replace(new(), owner={"host": platform.node(), "pid": os.getppid(), "start": "1.0"}), tmp_path)


def test_a_clock_that_is_set_ends_no_run(tmp_path, monkeypatch):
    record = replace(new(), owner=process(os.getppid()))
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + 7)
    assert is_alive(record, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into Linux's /proc")
def test_a_process_of_another_boot_or_start_is_another_one(tmp_path):
    owner = process(os.getppid())
    boot, ticks = owner["start"].split()
    for start in (f"{boot[::-1]} {ticks}", f"{boot} {int(ticks) + 2}", f"{boot} {int(ticks) - 2}"):
        assert not is_alive(replace(new(), owner={**owner, "start": start}), tmp_path)


LOOKS = """
import sys
from pathlib import Path
from workbench.journal.store import mark_killed
print(len(mark_killed(Path(sys.argv[1]))))
"""


def test_a_reader_in_another_time_namespace_sees_who_is_alive(tmp_path):
    unshare = ["unshare", "--time", "--boottime", "7"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to make a time namespace, and unshare of util-linux 2.36")
    replace(new(), owner=process(os.getpid())).save(tmp_path)
    replace(new(), owner={**process(os.getpid()), "pid": os.getppid()}).save(tmp_path)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    for command in ([], unshare):
        looked = [*command, sys.executable, "-c", LOOKS, str(tmp_path)]
        done = subprocess.run(looked, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == ("1\n" if not command else "0\n")


def test_a_killed_child_that_nobody_has_waited_for_is_dead(tmp_path):
    """As in a container, whose first process is seldom an init."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    record = replace(new(), owner=process(child.pid))
    assert is_alive(record, tmp_path)
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not is_alive(record, tmp_path)
    child.wait()


def test_a_folder_that_cannot_be_written_to_is_still_shown(tmp_path, monkeypatch):
    replace(new(), owner={"host": platform.node(), "pid": 2**40, "start": "0"}).save(tmp_path)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Record, "save", read_only)
    store.mark_killed(tmp_path)
    assert statuses(tmp_path) == [Status.RUNNING]


def test_while_it_ends_another_thread_does_not_call_it_dead(tmp_path, monkeypatch):
    record = store.begin(new(), tmp_path)
    removed = store.shutil.rmtree

    def slowly(*args, **kwargs):
        store.mark_killed(tmp_path)
        removed(*args, **kwargs)

    monkeypatch.setattr(store.shutil, "rmtree", slowly)
    store.end(replace(record, status=Status.OK), tmp_path)
    assert statuses(tmp_path) == [Status.OK]


# ---- resuming ----


def test_what_ended_or_still_runs_is_not_resumed(unfinished, resumable, subtests):
    for status in (Status.OK, Status.RUNNING, Status.DIVERGED, Status.UNAVAILABLE):
        with subtests.test(status=status):
            unfinished(status)
            assert resumable() is None


def test_the_newest_unfinished_run_of_the_recipe_is_resumed(unfinished, resumable, subtests):
    for status in (Status.KILLED, Status.INTERRUPTED, Status.FAILED, Status.OOM):
        with subtests.test(status=status):
            newest = unfinished(status)
            assert resumable() == newest


def test_without_a_checkpoint_there_is_nothing_to_resume(resumable, tmp_path):
    replace(new(), status=Status.KILLED).save(tmp_path)
    assert resumable() is None


DIFFERENT = (
    (Recipe(steps=31), {}, "steps was 12 and is now 31"),
    (Recipe(seed=1, learning_rate=1e-3), {}, "learning_rate was None and is now 0.001; seed was 0 and is now 1"),
    (Recipe() | Lora(rank=2), {}, "techniques was {} and is now {'lora': {'rank': 2"),
    (Recipe(), {"data_sha256": "b"}, "data_sha256 was 'a' and is now 'b'"),
    (Recipe(), {"device_kind": "cuda"}, "device_kind was 'cpu' and is now 'cuda'"),
    (Recipe(), {"threads": 8}, "threads was 2 and is now 8"),
)


def test_another_recipe_or_text_is_refused_with_the_difference(unfinished, resumable, subtests):
    record = unfinished()
    for recipe, facts, difference in DIFFERENT:
        with subtests.test(difference=difference):
            with pytest.raises(ConfigurationError) as caught:
                resumable(recipe, **facts)
            assert f"resume: the unfinished run {record.id} is another one: {difference}" in str(caught.value)
            assert "or run without resume" in str(caught.value)


def test_one_of_several_unfinished_runs_fits(unfinished, resumable):
    mine = unfinished()
    unfinished(steps=31)
    assert resumable() == mine


def test_when_there_is_nothing_to_resume_it_says_so(tmp_path, capsys):
    record = store.begin(new(), tmp_path, resume=True)
    assert record.warnings == [
        "nothing to resume: no unfinished run of this recipe has a whole checkpoint, so this one starts anew"
    ]
    assert capsys.readouterr().err == f"warning: {record.warnings[0]}\n"
    assert read_all(tmp_path) == [record]


def test_what_is_resumed_keeps_what_it_knew_and_takes_todays_cap(unfinished, tmp_path, capsys):
    old = unfinished()
    record = store.begin(replace(new(), memory_cap_bytes=7), tmp_path, resume=True)
    assert (record.id, record.status, record.memory_cap_bytes) == (old.id, Status.RUNNING, 7)
    assert record.owner["pid"] == os.getpid()
    assert capsys.readouterr().err == ""


def test_a_run_that_goes_on_elsewhere_is_not_resumed(unfinished, resumable, tmp_path, subtests):
    record = unfinished(Status.RUNNING)
    for owner in (process(os.getppid()), {"host": "elsewhere", "pid": 17, "start": "0"}):
        replace(record, owner=owner).save(tmp_path)
        with subtests.test(host=owner["host"]):
            with pytest.raises(ConfigurationError) as caught:
                resumable()
            beginning = f"resume: this run goes on as {record.id}, in process {owner['pid']} on {owner['host']}. Wait"
            assert str(caught.value).startswith(beginning)
            assert str(caught.value).endswith(f"write killed for running in {tmp_path / record.id}.json.")
            assert resumable(Recipe(steps=999)) is None  # another recipe has nothing to do with it


def resume_together(barrier, folder, answers):
    barrier.wait()
    try:
        answers.put(store.begin(new(), folder, resume=True).id)
    except ConfigurationError as error:
        answers.put(str(error))
    barrier.wait()  # it lives as long as the others look


@pytest.mark.parametrize("status", [Status.KILLED, Status.RUNNING])
def test_of_several_that_resume_at_once_one_goes_on(unfinished, tmp_path, status):
    """Three processes, four times: among those who see a dead `running` record, too, only one gets it."""
    dead = {"host": platform.node(), "pid": 2**40, "start": "0"}
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(3), context.SimpleQueue()
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        record = replace(unfinished(status), owner=dead)
        os.rename(tmp_path / record.id, folder / record.id)
        os.unlink(tmp_path / f"{record.id}.json")
        record.save(folder)

        def mark_and_resume(folder=folder):
            store.mark_killed(folder)
            resume_together(barrier, folder, answers)

        processes = [context.Process(target=mark_and_resume) for _ in range(3)]
        for process in processes:
            process.start()
        found = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        assert found.count(record.id) == 1, found
        assert sum(f"resume: this run goes on as {record.id}, in process " in answer for answer in found) == 2, found
