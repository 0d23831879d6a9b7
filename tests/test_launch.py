"""The one launcher: answers, errors, limits, cancellation, death, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace

import psutil
import pytest

from workbench.base.errors import ConfigurationError
from workbench.base.launch import LostChildError, can_be_forked, launch, start
from workbench.journal.record import Status, read_all
from workbench.training.execute import execute
from workbench.training.job import prepare
from workbench.training.ongoing import OngoingRun
from workbench.training.world import World

# Functions that are defined in a test are sent whole; one of this file would import it, and torch with it.


def test_a_function_is_answered_in_its_own_environment():
    variables = {**os.environ, "LAUNCHED": "yes"}
    assert launch(lambda name: os.environ.get(name), "LAUNCHED", environment=variables) == "yes"
    assert "LAUNCHED" not in os.environ


def test_what_goes_wrong_there_is_raised_here_with_its_traceback(subtests):
    def failing():
        raise KeyError("x")

    with subtests.test("a failure"), pytest.raises(RuntimeError, match=r'raise KeyError\("x"\)'):
        launch(failing)
    with subtests.test("a time limit"), pytest.raises(LostChildError, match=r"child: no answer within 0\.5 s"):
        launch(time.sleep, 60, time_limit=0.5)
    with subtests.test("a kill"), pytest.raises(LostChildError, match=r"killed in the middle \(signal 9\)"):
        launch(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with subtests.test("what cannot be sent"), pytest.raises(ConfigurationError, match="cannot be sent"):
        launch(print, (number for number in range(3)))


def test_one_that_is_cancelled_stops_as_at_ctrl_c_and_else_by_force(subtests, tmp_path):
    def working(folder, handler):
        signal.signal(signal.SIGINT, handler)
        (folder / "working").touch()
        time.sleep(60)

    for handler, message in (
        (signal.default_int_handler, "it was cancelled"),
        (signal.SIG_IGN, "ended by force when it did not stop"),
    ):
        with subtests.test(message), closing(start(working, tmp_path, handler)) as child:
            while not (tmp_path / "working").exists():
                time.sleep(0.01)
            child.cancel()
            with pytest.raises(LostChildError, match=message):
                child.answer()
            (tmp_path / "working").unlink()


def test_only_linux_forks(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")  # where no process opens a pipe of another by its name in /proc
    assert not can_be_forked()


def test_a_child_that_works_ends_with_its_caller():
    code = (
        "import os, time; from workbench.base.launch import start\n"
        "child = start(time.sleep, 600); print(child.process.pid, flush=True); time.sleep(2); os._exit(0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(answer.stdout))
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def executed_here(job):
    return execute(OngoingRun(job))


@pytest.mark.dear
def test_a_run_that_is_cancelled_in_a_child_ends_its_own_record(recipe, runs_folder):
    job = prepare(replace(recipe, steps=100_000), World.find("cpu"), folder=runs_folder)
    with closing(start(executed_here, job)) as child:
        while not any(record.steps_done for record in read_all(runs_folder)):
            time.sleep(0.1)
        child.cancel()
        record = child.answer()
    assert (record.id, record.status) == (job.record.id, Status.INTERRUPTED)
    assert read_all(runs_folder) == [record]
