"""Two runs in one process would share PyTorch's modes and Accelerate's state: the second is refused."""

import itertools
import multiprocessing
import re
import threading
from dataclasses import replace
from functools import partial

import pytest
from every_step import EveryStep
from pairs import pairs

from workbench import predict
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.journal.record import Status, read_all
from workbench.training.run import only_run, run
from workbench.widgets.runner import Runner

REFUSED = (
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


@pytest.fixture(autouse=True)
def the_next_may_begin(three):
    """Whatever a test did, it has let go."""
    yield
    with only_run(three):
        pass


def during(recipe, action, **options):
    """A run, and what came of an action while it goes on."""
    results = []

    def act():
        if not results:
            results.append(action())

    return run(recipe, device="cpu", callbacks=[EveryStep(act)], **options), results[0]


def caught(action):
    try:
        return action()
    except Exception as error:
        return error


def in_a_thread(action):
    """Its result, or what it raised."""
    results = []
    thread = threading.Thread(target=lambda: results.append(caught(action)), name="the other")
    thread.start()
    thread.join(60)
    return results[0]


OPTIONS = ({}, {"reuse": True}, {"resume": True}, {"memory_cap": "1MiB"})


def test_a_second_run_is_refused_and_the_first_goes_on(three, alone, runs_folder, subtests):
    def second_runs():
        attempts = []
        for start, options in itertools.product((in_a_thread, caught), OPTIONS):
            second = partial(run, replace(three, seed=1), device="cpu", **options)
            attempts.append((start, options, start(second)))
        return attempts

    record, attempts = during(three, second_runs)
    for start, options, error in attempts:
        with subtests.test(start=start.__name__, options=options):
            assert type(error) is ConfigurationError
            assert re.match(REFUSED, str(error))
    assert_unharmed(record, alone)
    assert read_all(runs_folder) == [record]


def test_many_at_once_let_exactly_one_through(three, alone):
    barrier, results = threading.Barrier(6), []

    def start():
        barrier.wait()
        results.append(caught(lambda: run(three, device="cpu")))

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (record,) = [result for result in results if not isinstance(result, Exception)]
    assert {type(result) for result in results if result is not record} == {ConfigurationError}
    assert_unharmed(record, alone)


@pytest.mark.dear
def test_the_playground_and_a_cell_train_in_processes_of_their_own(three, alone, onlooker):
    runner = Runner()
    runner.attach(onlooker)

    def second():
        runner.start(three)
        runner.wait(60)

    record, _ = during(three, second)
    assert_unharmed(record, alone)
    ((other, _),) = onlooker.ended_as
    assert_unharmed(other, alone)
    assert other.owner["pid"] != record.owner["pid"]


def test_pairs_are_refused_and_a_prediction_disturbs_nothing(three, alone):
    def both():
        refused = in_a_thread(lambda: pairs(three, ["lora"], device="cpu"))
        return refused, in_a_thread(lambda: predict(replace(three, seed=77), "cpu"))

    record, (refused, predicted) = during(three, both)
    assert "another run goes on in this process" in str(refused)
    assert predicted.peak_allocated_bytes > 0
    assert_unharmed(record, alone)


ENDINGS = (  # what is raised in the middle of a run, what comes of it, and how it is on record
    (KeyboardInterrupt, KeyboardInterrupt, Status.INTERRUPTED),
    (ZeroDivisionError, ZeroDivisionError, Status.FAILED),
    (GeneratorExit, GeneratorExit, Status.INTERRUPTED),
    (SystemExit, SystemExit, Status.INTERRUPTED),
    (MemoryError("can't allocate memory"), OutOfMemoryError, Status.OOM),
)


def test_after_every_ending_and_every_refusal_the_next_may_begin(three, tmp_path, subtests):
    for error, ending, status in ENDINGS:

        def fail(error=error):
            raise error

        with subtests.test(error=error):
            folder = tmp_path / ending.__name__
            with pytest.raises(ending):
                run(three, device="cpu", callbacks=[EveryStep(fail)], folder=folder)
            (record,) = read_all(folder)
            assert record.status is status
            with only_run(three):
                pass
    for change in ({"corpus": "nope.txt"}, {"model": "./nope"}, {"sequence_length": 1000}):
        with subtests.test(change=change):
            with pytest.raises(ConfigurationError):
                run(replace(three, **change), device="cpu")
            with only_run(three):
                pass


def test_a_generator_that_is_closed_or_forgotten_lets_go(three):
    def lesson():
        with only_run(three):
            yield

    started = lesson()
    next(started)
    for _ in range(2):  # the refused one has not let go for the other
        with pytest.raises(ConfigurationError, match=REFUSED), only_run(three):
            pytest.fail("two at once")
    started.close()
    with only_run(three):
        pass
    next(lesson())  # forgotten


def in_a_fork(recipe):
    with only_run(recipe), pytest.raises(ConfigurationError, match=REFUSED), only_run(recipe):
        pass


def test_a_fork_of_a_process_that_trains_may_train(three):
    with only_run(three):
        child = multiprocessing.get_context("fork").Process(target=in_a_fork, args=(three,))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        with pytest.raises(ConfigurationError, match=REFUSED), only_run(three):
            pytest.fail("the fork has let go for this process")
