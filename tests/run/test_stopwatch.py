"""Seconds of steps, of this process and of others: on clocks that are made up, and on this machine's."""

import multiprocessing
import time

import numpy as np
import pytest

from workbench.run import stopwatch
from workbench.run.stopwatch import WARM_UP_STEPS, Stopwatch, clocks, processors


@pytest.fixture
def clock(monkeypatch):
    """What the clocks show: changed in place."""
    now = np.zeros(3)
    monkeypatch.setattr(stopwatch, "clocks", now.copy)
    monkeypatch.setattr(stopwatch, "processors", lambda: [0, 1])
    return now


def laps(clock, watch, *steps):
    for tokens, step in enumerate(steps, 1):
        clock += step
        watch.lap(100 * tokens)


def test_the_steps_after_the_warm_up_are_timed(clock):
    watch = Stopwatch()
    laps(clock, watch, *[(50, 90, 0)] * WARM_UP_STEPS, (2, 4, 0), (2, 4, 0))
    assert watch.speed() == {
        "timed_steps": 2, "step_time_s": 2, "tokens_per_s": 50, "step_processor_s": 4, "contended_share": 0,
    }  # fmt: skip


def test_what_lies_between_two_steps_does_not_count(clock):
    watch = Stopwatch()
    watch.pause()  # before the first
    laps(clock, watch, *[(1, 2, 0)] * (WARM_UP_STEPS + 1))
    clock += (100, 3, 190)
    watch.pause()
    laps(clock, watch, (3, 6, 0))
    assert watch.speed()["step_time_s"] == 2
    assert watch.speed()["step_processor_s"] == 4


@pytest.mark.parametrize(
    ("own", "idle", "share"),
    [(20, 0, 0.0), (10, 10, 0.0), (0, 20, 0.0), (13, 0, 0.35), (5, 0, 0.75), (5, 5, 0.25)],
    ids=["both mine", "one mine", "none mine", "a neighbour", "three neighbours", "another and an idle one"],
)
def test_others_count_where_no_processor_was_idle_for_them(clock, own, idle, share):
    watch = Stopwatch()
    laps(clock, watch, *[(1, 0, 0)] * WARM_UP_STEPS, (10, own, idle))
    assert watch.speed()["contended_share"] == share


def test_too_few_steps_have_no_speed(clock):
    watch = Stopwatch()
    laps(clock, watch, *[(1, 1, 1)] * WARM_UP_STEPS)
    assert watch.speed() == {"timed_steps": 0}


def spin():
    while True:
        pass


def test_this_machines_clocks_see_other_processes():
    busy = [multiprocessing.Process(target=spin, daemon=True) for _ in processors()]
    for process in busy:
        process.start()
    watch = Stopwatch()
    for _ in range(WARM_UP_STEPS):
        watch.lap(0)
    until = time.perf_counter() + 1.0
    while time.perf_counter() < until:
        pass
    watch.lap(1)
    for process in busy:
        process.kill()
    assert watch.speed()["contended_share"] > 0.1
    assert (np.diff([clocks(), clocks()], axis=0) >= 0).all()
