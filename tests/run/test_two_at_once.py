"""Two runs in one process would share PyTorch's modes and Accelerate's state: the second is refused."""

import multiprocessing
import os
import threading
from dataclasses import replace

import pytest

from workbench import predict
from workbench.advise.pairs import pairs
from workbench.errors import ConfigurationError, OutOfMemoryError
from workbench.records.record import Status, read_all
from workbench.run import run as training
from workbench.run.run import only_run, run
from workbench.widgets.runner import Runner

WORDS = (
    "run: another run goes on in this process \\(baseline on .*, in the thread .*\\).* Wait for it, stop it with Ctrl-C"
)


@pytest.fixture(scope="module")
def three(recipe):
    return replace(recipe, steps=3)


@pytest.fixture(scope="module")
def alone(three, fine_tuned):
    """What nobody disturbed."""
    return fine_tuned(three)


def assert_unharmed(record, alone):
    assert record.status is Status.OK
    assert (record.losses, record.held_out_loss) == (alone.losses, alone.held_out_loss)
    assert (record.peak_allocated_bytes, record.by_category) == (alone.peak_allocated_bytes, alone.by_category)
    assert training._going_on == {}


def during(recipe, action, **options):
    """A run, and what came of an action while it goes on."""
    seen = []

    def observe(so_far):
        if not seen:
            seen.append(action())

    return run(recipe, device="cpu", observe=observe, **options), seen[0]


def caught(action):
    try:
        return action()
    except Exception as error:
        return error


def in_a_thread(action):
    """Its result, or what it raised."""
    found = []
    thread = threading.Thread(target=lambda: found.append(caught(action)), name="the other")
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("start", [in_a_thread, caught], ids=["in another thread", "in the callback"])
@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"resume": True}, {"memory_cap": "1MiB"}], ids=str)
def test_a_second_run_is_refused_and_the_first_goes_on(three, alone, runs_folder, start, options):
    def second():
        return run(replace(three, seed=1), device="cpu", **options)

    record, refused = during(three, lambda: start(second))
    assert type(refused) is ConfigurationError
    with pytest.raises(ConfigurationError, match=WORDS):
        raise refused
    assert_unharmed(record, alone)
    assert read_all(runs_folder) == [record]


def test_many_at_once_let_exactly_one_through(three, alone):
    barrier, found = threading.Barrier(6), []

    def start():
        barrier.wait()
        found.append(caught(lambda: run(three, device="cpu")))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (record,) = [one for one in found if not isinstance(one, Exception)]
    assert {type(one) for one in found if one is not record} == {ConfigurationError}
    assert_unharmed(record, alone)


def test_the_playgrounds_training_says_that_a_cell_is_training(three, alone, onlooker):
    runner = Runner()
    runner.attach(onlooker)

    def second():
        runner.start(replace(three, seed=2))
        runner.wait(30)

    record, _ = during(three, second)
    ((left, words),) = onlooker.ended_as
    assert left is None
    assert "another run goes on in this process (baseline on" in words
    assert_unharmed(record, alone)


def test_a_cell_is_told_that_the_playground_trains(three, alone, onlooker):
    refused, runner = [], Runner()
    onlooker.each = lambda: refused.append(caught(lambda: run(three, device="cpu")))
    runner.attach(onlooker)
    runner.start(three)
    runner.wait(60)
    assert "in the thread playground" in str(refused[0])
    assert_unharmed(onlooker.ended_as[0][0], alone)


def test_pairs_are_refused_too(three, alone):
    record, refused = during(three, lambda: in_a_thread(lambda: pairs(three, ["lora"], device="cpu")))
    assert "another run goes on in this process" in str(refused)
    assert_unharmed(record, alone)


def test_a_prediction_in_another_thread_disturbs_nothing(three, alone):
    record, predicted = during(three, lambda: in_a_thread(lambda: predict(replace(three, seed=77), "cpu")))
    assert predicted.peak_allocated_bytes > 0
    assert_unharmed(record, alone)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (KeyboardInterrupt, KeyboardInterrupt),
        (ZeroDivisionError, ZeroDivisionError),
        (GeneratorExit, GeneratorExit),
        (SystemExit, SystemExit),
        (MemoryError("can't allocate memory"), OutOfMemoryError),
    ],
)
def test_after_every_ending_the_next_may_begin(three, error, ending, runs_folder):
    def observe(so_far):
        raise error

    with pytest.raises(ending):
        run(three, device="cpu", observe=observe)
    assert training._going_on == {}
    (record,) = read_all(runs_folder)
    assert record.status in (Status.INTERRUPTED, Status.FAILED, Status.OOM)


@pytest.mark.parametrize("change", [{"corpus": "nope.txt"}, {"model": "./nope"}, {"sequence_length": 1000}])
def test_after_a_refusal_the_next_may_begin(three, change):
    with pytest.raises(ConfigurationError):
        run(replace(three, **change), device="cpu")
    assert training._going_on == {}


def test_a_generator_that_is_closed_or_forgotten_lets_go(three):
    def lesson():
        with only_run(three):
            yield

    started = lesson()
    next(started)
    with pytest.raises(ConfigurationError, match=WORDS), only_run(three):
        pytest.fail("two at once")
    assert training._going_on  # the refused one has not let go for the other
    started.close()
    assert training._going_on == {}
    next(lesson())
    assert training._going_on == {}


def in_a_fork(recipe, answers):
    with only_run(recipe):
        answers.put(len(training._going_on))


def test_a_fork_of_a_process_that_trains_may_train(three):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with only_run(three):
        child = context.Process(target=in_a_fork, args=(three, answers))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert answers.get() == 2
        assert list(training._going_on) == [os.getpid()]
