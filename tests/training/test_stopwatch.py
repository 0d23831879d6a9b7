"""Seconds of steps, of this process and of others: on clocks that are made up, and on this machine's."""

import multiprocessing
import time

import numpy as np
import pytest

from workbench.training import stopwatch
from workbench.training.stopwatch import WARM_UP_STEPS, Stopwatch, clocks, processors


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


SHARES = {  # seconds of this process and of no process in 10 s on two processors; the share of others
    "both mine": (20, 0, 0.0),
    "one mine": (10, 10, 0.0),
    "none mine": (0, 20, 0.0),
    "a neighbour": (13, 0, 0.35),
    "three neighbours": (5, 0, 0.75),
    "another and an idle one": (5, 5, 0.25),
}


def test_others_count_where_no_processor_was_idle_for_them(clock, subtests):
    for case, (own, idle, share) in SHARES.items():
        with subtests.test(case=case):
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
    until = time.perf_counter() + 0.5
    while time.perf_counter() < until:
        pass
    watch.lap(1)
    for process in busy:
        process.kill()
    assert watch.speed()["contended_share"] > 0.1
    assert (np.diff([clocks(), clocks()], axis=0) >= 0).all()
