"""Start and Stop of a training in a process of its own: the panels are told once, whatever happens to that process."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from workbench.base import launch
from workbench.base.launch import WARM_PROCESSES, warm_child, warm_up
from workbench.journal.record import Status, read_all
from workbench.widgets import runner as module
from workbench.widgets.runner import Runner

pytestmark = pytest.mark.dear  # all libraries are imported once more


@pytest.fixture
def runner(onlooker, monkeypatch):
    started = Runner()
    started.attach(onlooker)
    yield started
    started.stop()
    started.wait(60)


@pytest.fixture
def endless(recipe):
    return replace(recipe, steps=100_000)


def wait_for_a_step(folder, besides=0):
    deadline = time.monotonic() + 60
    while sum(bool(record.steps_done) for record in read_all(folder)) <= besides:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def the_child(folder):
    (record,) = (record for record in read_all(folder) if record.status is Status.RUNNING)
    return psutil.Process(record.owner["pid"])


def test_what_does_not_hear_of_stop_is_ended_by_force_and_told_as_killed(
    runner, onlooker, endless, runs_folder, monkeypatch
):
    def deaf():
        import signal

        from workbench.training.elsewhere import execute_in_child

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return execute_in_child()

    monkeypatch.setattr(module, "execute_in_child", deaf)
    runner.start(endless, runs_folder)
    wait_for_a_step(runs_folder)
    child = the_child(runs_folder)
    runner.stop()
    runner.wait(20)
    ((record, message),) = onlooker.ended_as
    assert (record.status, message) == (Status.KILLED, "")
    assert "ended by force when it did not stop" in record.error
    assert record.steps_done > 0
    assert read_all(runs_folder) == [record]
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_one_that_is_killed_is_told_with_its_steps(runner, onlooker, endless, runs_folder):
    runner.start(endless, runs_folder)
    wait_for_a_step(runs_folder)
    os.kill(the_child(runs_folder).pid, signal.SIGKILL)
    runner.wait(20)
    ((record, _),) = onlooker.ended_as
    assert record.status is Status.KILLED
    assert "killed in the middle" in record.error
    assert record.steps_done > 0
    assert read_all(runs_folder) == [record]


def test_stop_is_heard_before_anything_has_begun(runner, onlooker, endless, runs_folder):
    WARM_PROCESSES.end()  # so that the libraries have to be imported first
    runner.start(endless, runs_folder)
    began_at_s = time.monotonic()
    runner.stop()
    runner.wait(20)
    print(f"stopped after {time.monotonic() - began_at_s:.2f} s")
    assert onlooker.ended_as == [(None, "stopped")]
    assert read_all(runs_folder) == []
    assert not runner.running


def test_a_start_right_after_a_stop_trains_and_the_libraries_are_loaded_once(runner, onlooker, endless, runs_folder):
    WARM_PROCESSES.end()
    loading = warm_up()
    runner.start(endless, runs_folder)
    runner.stop()
    runner.wait(20)
    runner.start(endless, runs_folder)
    wait_for_a_step(runs_folder)
    assert onlooker.ended_as == [(None, "stopped")]
    assert warm_up() is loading


def test_one_who_cannot_look_on_any_more_ends_no_training(runner, onlooker, endless, runs_folder, monkeypatch, capsys):
    """As at the restart of a kernel: the run is then on record as killed, with its steps, and not as failed."""
    blind, seen = type(onlooker)(), []

    def closed(*_):
        raise RuntimeError("Event loop is closed")

    blind.on_progress = blind.on_end = closed
    monkeypatch.setattr(module, "REFRESH_S", 0.05)
    monkeypatch.setattr(onlooker, "on_progress", seen.append)
    runner.attach(blind)
    runner.start(endless, runs_folder)
    deadline = time.monotonic() + 60
    while len(seen) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    runner.stop()
    runner.wait(20)
    assert [record.status for record, _ in onlooker.ended_as] == [Status.INTERRUPTED]
    assert "Event loop is closed" in capsys.readouterr().err


def test_what_was_to_stop_one_training_does_not_stop_the_next(runner, onlooker, endless, runs_folder):
    runner.start(endless, runs_folder)
    wait_for_a_step(runs_folder)
    runner.stop()
    runner.wait(20)
    runner.start(endless, runs_folder)
    wait_for_a_step(runs_folder, besides=1)
    assert runner.running
    assert len(onlooker.ended_as) == 1


def test_relative_paths_are_those_of_the_caller(
    runner, onlooker, recipe, tmp_path, text_file, runs_folder, monkeypatch
):
    """Of the moment, whatever they were when the libraries were imported."""
    warm_child("another").close()
    (tmp_path / "mine.txt").write_text(text_file.read_text())
    monkeypatch.chdir(tmp_path)
    runner.start(replace(recipe, corpus="mine.txt", steps=1), runs_folder)
    runner.wait(60)
    assert [record.status for record, _ in onlooker.ended_as] == [Status.OK]


def test_where_nothing_can_be_forked_the_warm_process_itself_trains(runner, onlooker, recipe, runs_folder, monkeypatch):
    monkeypatch.setattr(launch, "can_be_forked", lambda: False)
    for number in (1, 2):
        runner.start(replace(recipe, steps=number), runs_folder)
        runner.wait(60)
    assert [record.status for record, _ in onlooker.ended_as] == [Status.OK] * 2
    assert len({record.owner["pid"] for record, _ in onlooker.ended_as}) == 2
    WARM_PROCESSES.end()
