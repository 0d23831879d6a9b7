"""Stop, however slowly what is stopped comes to its end: the panels are told once, and the next training may begin."""

import contextlib
import time

import pytest

from workbench.recipe import Recipe
from workbench.widgets import runner as module
from workbench.widgets.runner import STOP_PATIENCE_S, Runner

RECIPE = Recipe(model="gpt2-tiny")


def steps_until_stopped(recipe, observe, **_):
    while True:
        observe(lambda: None)
        time.sleep(0.01)


def one_long_step(recipe, observe, **_):
    observe(lambda: None)
    while True:
        time.sleep(0.01)


def steps_that_lose_an_interrupt(recipe, observe, **_):
    """As Python does with one that comes while it runs a finalizer: it is printed, and the training goes on."""
    with contextlib.suppress(KeyboardInterrupt):
        one_long_step(recipe, observe)
    steps_until_stopped(recipe, observe)


def the_last_step(recipe, observe, **_):
    time.sleep(STOP_PATIENCE_S)  # nobody is asked again


@pytest.fixture
def training(monkeypatch, onlooker):
    monkeypatch.setattr(onlooker, "progressed", lambda record: None)
    runner = Runner()
    runner.attach(onlooker)

    def started(run):
        monkeypatch.setattr(module, "run", run)
        runner.start(RECIPE)
        time.sleep(0.1)
        return runner

    return started


@pytest.mark.parametrize("run", [steps_until_stopped, one_long_step, steps_that_lose_an_interrupt, the_last_step])
def test_the_end_is_told_however_long_it_takes(training, onlooker, monkeypatch, run):
    """A second interrupt, a moment after the first, would have ended the telling."""

    def read_slowly(folder):
        for _ in range(30):
            time.sleep(STOP_PATIENCE_S / 10)
        return []

    monkeypatch.setattr(module, "read_all", read_slowly)
    runner = training(run)
    runner.stop()
    runner.wait(60)
    assert onlooker.ended_as == [(None, "" if run is the_last_step else "stopped")]
    assert not runner.running


def test_a_step_that_takes_long_is_interrupted_and_a_short_one_ends(training, onlooker):
    for run in (one_long_step, steps_until_stopped):
        runner = training(run)
        runner.stop()
        runner.wait(60)
    assert [words for _, words in onlooker.ended_as] == ["stopped", "stopped"]


def test_one_who_cannot_look_on_any_more_ends_no_training(training, onlooker, monkeypatch, capsys):
    """As at the restart of a kernel: the run is then on record as killed, with its steps, and not as failed."""
    blind, seen = type(onlooker)(), []

    def closed(*_):
        raise RuntimeError("Event loop is closed")

    blind.progressed = blind.ended = closed
    monkeypatch.setattr(module, "REFRESH_S", 0.0)
    monkeypatch.setattr(onlooker, "progressed", seen.append)
    runner = training(steps_until_stopped)
    runner.attach(blind)
    time.sleep(0.2)
    steps = len(seen)
    time.sleep(0.2)
    assert len(seen) > steps > 0
    runner.stop()
    runner.wait(60)
    assert onlooker.ended_as == [(None, "stopped")]
    assert "Event loop is closed" in capsys.readouterr().err


def test_what_was_to_stop_one_training_does_not_stop_the_next(training, onlooker):
    runner = training(steps_until_stopped)
    runner.stop()
    runner.wait(60)
    runner = training(steps_until_stopped)  # before the patience with the first has ended
    time.sleep(2 * STOP_PATIENCE_S)
    assert runner.running
    assert len(onlooker.ended_as) == 1
    runner.stop()
    runner.wait(60)
