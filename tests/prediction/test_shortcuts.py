"""What a prediction leaves out changes nothing: beside each shortcut stands the long way, and both must agree.

And what takes too long is ended.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from workbench import Recipe, predict
from workbench.base.errors import ConfigurationError, UnavailableError
from workbench.base.launch import Child, Fork
from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import call
from workbench.prediction import rows
from workbench.prediction import worker as prediction_worker
from workbench.prediction.predict import EMULATOR
from workbench.prediction.shadow import step
from workbench.prediction.shadow.replay import replay
from workbench.techniques import (
    ActivationOffloading,
    Allocator,
    BatchSize,
    ChunkedCrossEntropy,
    GradientAccumulation,
    GradientCheckpointing,
    Lora,
    MixedPrecision,
    Optimizer,
    OptimizerOffloading,
    Qlora,
    SequenceLength,
)

T4, MANY = gpu("t4"), 10**9
STEPS = (
    (), (Lora(rank=4), GradientCheckpointing()), (ActivationOffloading(),), (OptimizerOffloading(),),
    (Optimizer(kind="adamw_8bit"),), (Qlora(),), (GradientAccumulation(steps=2), ChunkedCrossEntropy()),
)  # fmt: skip


@pytest.fixture(scope="module")
def small(model_name) -> Recipe:
    return Recipe(model=model_name, effective_batch_size=8, sequence_length=32, dropout=0.1)


NUMBERS = ("peak_allocated_bytes", "peak_reserved_bytes", "by_category", "by_phase", "peak_operation")


def assert_same(shortened: Recipe, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object) -> None:
    """The recipe's numbers are the same with another value, with which nothing is left out."""
    short = step.trace(shortened, T4)
    monkeypatch.setattr(owner, name, value)
    long = step.trace(shortened, T4)
    assert short.events < long.events or name == "foresee"  # something was left out, or not traced
    assert short.work == long.work
    short_numbers, long_numbers = replay(short, T4), replay(long, T4)
    assert {name: short_numbers[name] for name in NUMBERS} == {name: long_numbers[name] for name in NUMBERS}


def lives(trace, until: int):
    """Of every storage, in the order of birth, its bytes, category, maker, birth and end."""
    order = np.argsort(trace.born)
    makers = [trace.operations[maker] for maker in trace.maker[order]]
    died = np.where(trace.died < until, trace.died, -1)
    return [*zip(trace.nbytes[order], trace.category[order], makers, trace.born[order], died[order], strict=True)]


def label(techniques):
    return "+".join(technique.name for technique in techniques) or "baseline"


def assert_foreseen_as_traced(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    foreseen = step.trace(recipe, T4)
    with monkeypatch.context() as patch:
        patch.setattr(step, "foresee", lambda *_: None)
        traced = step.trace(recipe, T4)
    assert lives(foreseen, foreseen.events) == lives(traced, foreseen.events)
    assert foreseen.work == traced.work
    assert foreseen.phases() == traced.phases()[: foreseen.events]
    shared = [{int(trace.born[first]): work for first, work in trace.shared.items()} for trace in (foreseen, traced)]
    assert shared[0] == shared[1]


def test_a_third_step_and_a_second_evaluation_are_foreseen_to_the_byte(small, monkeypatch):
    assert_foreseen_as_traced(small | Lora(rank=4) | GradientCheckpointing(), monkeypatch)


@pytest.mark.dear
def test_they_are_foreseen_with_any_technique(small, monkeypatch, subtests):
    for techniques in STEPS:
        with subtests.test(techniques=label(techniques)):
            assert_foreseen_as_traced(replace(small, techniques=techniques), monkeypatch)


def test_so_they_are_where_weights_are_cast(small, monkeypatch):
    """What autocast has cast goes in no fixed order."""
    answers, foreseen = [], step.foresee

    def noted(*arguments):
        answers.append(foreseen(*arguments))
        return answers[-1]

    monkeypatch.setattr(step, "foresee", noted)
    assert_same(small | MixedPrecision(dtype="fp16"), monkeypatch, step, "foresee", lambda *_: None)
    assert answers != [None]


def test_steps_that_differ_are_not_foreseen(small, monkeypatch):
    steps = []

    def another(meter, phase):
        enter(meter, phase)
        if phase is None:
            steps.append(step.torch.zeros(1000 * (len(steps) + 1)))

    enter = step.Meter.enter_phase
    monkeypatch.setattr(step.Meter, "enter_phase", another)
    trace = step.trace(small, T4)
    kept = trace.nbytes[(trace.died < 0) & (trace.nbytes % 4000 == 0) & (trace.nbytes > 0)]
    assert {4000, 8000, 12000, 16000, 20000} <= set(map(int, kept))


@pytest.mark.parametrize("partners", [(), (Lora(), GradientCheckpointing())], ids=label)
def test_a_few_micro_batches_take_what_all_take(small, partners, monkeypatch):
    recipe = replace(small, techniques=(GradientAccumulation(steps=8), *partners))
    assert_same(recipe, monkeypatch, step, "MICRO_BATCHES", MANY)


@pytest.mark.parametrize("techniques", [(), (GradientAccumulation(steps=2),)], ids=label)
def test_a_few_evaluated_batches_take_what_all_take(small, techniques, monkeypatch):
    assert_same(replace(small, techniques=techniques), monkeypatch, rows, "EVALUATION_BATCHES", MANY)


def test_rows_and_micro_batches_that_are_not_listed_take_what_they_would(small, monkeypatch):
    recipe = small | GradientAccumulation(steps=8)
    whole = replay(step.trace(recipe, T4), T4)
    monkeypatch.setattr(rows, "FETCHED_MICRO_BATCHES", 4)
    monkeypatch.setattr(rows, "FETCHED_TOKENS", 2 * 4 * 32)
    assert rows.count_fetched(replace(recipe, effective_batch_size=64)) == (2, 4)
    few = replay(step.trace(recipe, T4), T4)
    assert few["peak_allocated_bytes"] == pytest.approx(whole["peak_allocated_bytes"], abs=16 * 512)
    assert few["peak_reserved_bytes"] == whole["peak_reserved_bytes"]


def test_a_large_batch_is_predicted_like_a_small_one(small):
    large, half = (predict(replace(small, effective_batch_size=n), time_limit=60) for n in (65_534, 32_767))
    assert large.peak_allocated_bytes / half.peak_allocated_bytes == pytest.approx(2, rel=0.01)
    assert (large.micro_batch_size, large.fits) == (65_534, False)
    with pytest.raises(ConfigurationError, match="65,535 sequences at once, and this step has 1,048,576. Lower"):
        predict(replace(small, effective_batch_size=2**20))


def test_as_many_micro_batches_are_too(small):
    recipe = replace(small, effective_batch_size=2**16)
    found = predict(recipe | GradientAccumulation(steps=2**16), time_limit=60)
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (1, 2**16)
    assert found.flops == 2**16 * predict(replace(small, effective_batch_size=1)).flops
    inputs = 2 * 2**16 * 32 * 8
    assert found.maximum_by_category["temporaries"] > inputs
    assert predict(recipe | BatchSize(size=1)).peak_allocated_bytes < found.peak_allocated_bytes


def test_shorter_sequences_of_a_large_batch_too(small):
    found = predict(replace(small, effective_batch_size=2**15) | SequenceLength(tokens=16), time_limit=60)
    assert found.micro_batch_size == 2**15


# ---- the limit of time ----


def test_an_answer_that_takes_too_long_ends_the_process():
    worker = Child(dict(os.environ), (), name="prediction worker")
    with pytest.raises(UnavailableError, match=r"prediction worker: no answer within 0.2 s.*longer time_limit"):
        worker.call(time.sleep, 60, time_limit=0.2)
    assert worker.process.wait(timeout=10) < 0
    worker.close()


def test_within_the_limit_the_clock_is_stopped():
    worker = Child(dict(os.environ), ())
    assert worker.call(abs, -1, time_limit=30) == 1
    assert worker.call(abs, -2) == 2
    assert worker.is_alive()
    worker.close()


@pytest.mark.dear
def test_the_next_prediction_has_a_new_worker(small):
    with pytest.raises(UnavailableError, match="no answer within"):
        predict(small | Lora(rank=3), time_limit=0.01)
    ended = prediction_worker.SHADOWS.children["shadow"]
    assert predict(small | Lora(rank=3)).peak_allocated_bytes > 0
    assert prediction_worker.SHADOWS.children["shadow"] is not ended


@pytest.mark.dear
@pytest.mark.xdist_group("emulated")
@pytest.mark.usefixtures("emulator")
class TestOnAnEmulatedGpu:
    def test_a_card_that_takes_too_long_is_replaced(self):
        with pytest.raises(UnavailableError, match="no answer within"):
            call.call_on(T4, time.sleep, 60, time_limit=0.2)
        assert call.call_on(T4, abs, -1) == 1

    def test_a_large_batch_is_quick_or_refused(self, small):
        many = replace(small, effective_batch_size=2**16) | GradientAccumulation(steps=2**16)
        found, alone = (
            predict(recipe, "t4", engine=EMULATOR, time_limit=60)
            for recipe in (many, replace(small, effective_batch_size=1))
        )
        assert (found.micro_batch_size, found.gradient_accumulation_steps) == (1, 2**16)
        assert found.flops == 2**16 * alone.flops
        with pytest.raises(ConfigurationError, match="more than 8192 GiB, which no GPU has. Lower effective_batch"):
            predict(
                replace(small, effective_batch_size=2**15, sequence_length=1024, model="random:gpt2"),
                "t4",
                engine=EMULATOR,
            )


# ---- a fork of a process ----


@pytest.fixture
def trunk():
    worker = Child(dict(os.environ), ("json",), name="trunk")
    yield worker
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for the emulated GPU")
class TestForks:
    def test_a_fork_has_an_environment_of_its_own_and_leaves_the_trunk_as_it_was(self, trunk):
        one, other = (Fork(trunk, {"NAME": name}, name) for name in ("one", "other"))
        assert [worker.call(os.getenv, "NAME") for worker in (one, other, trunk)] == ["one", "other", None]
        assert len({worker.call(os.getpid) for worker in (one, other, trunk)}) == 3
        one.close()
        assert (one.is_alive(), other.call(abs, -1), trunk.call(abs, -2)) == (False, 1, 2)
        other.close()

    def test_what_is_killed_says_so_and_is_gone(self, trunk):
        fork = Fork(trunk, {}, "the fork")
        with pytest.raises(UnavailableError, match=r"the fork: it was killed in the middle \(a signal\)"):
            fork.call(os.kill, fork.process.pid, signal.SIGKILL)
        assert not fork.is_alive()
        assert not Path(f"/proc/{fork.process.pid}").exists()  # not even a zombie
        fork.close()

    def test_an_error_in_a_fork_is_its_answer(self, trunk):
        fork = Fork(trunk, {}, "the fork")
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            fork.call(divmod, 1, 0)
        assert fork.call(os.getpid) == fork.process.pid
        fork.close()

    def test_one_that_takes_too_long_is_ended(self, trunk):
        fork = Fork(trunk, {}, "the fork")
        with pytest.raises(UnavailableError, match="no answer within 0.2 s"):
            fork.call(time.sleep, 60, time_limit=0.2)
        assert fork.has_ended(10)
        fork.close()

    def test_forks_live_without_the_trunk_and_its_end_is_seen(self, trunk):
        fork = Fork(trunk, {}, "the fork")
        with pytest.raises(UnavailableError, match=r"trunk: it was killed in the middle \(signal 9\)"):
            trunk.call(os.kill, trunk.process.pid, signal.SIGKILL)
        assert fork.call(abs, -1) == 1
        fork.close()

    def test_they_end_with_their_owner(self):
        code = (
            "import os; from workbench.base.launch import Child, Fork\n"
            "trunk = Child(dict(os.environ), ()); fork = Fork(trunk, dict(os.environ), 'fork')\n"
            "print(fork.process.pid, trunk.process.pid, flush=True); os._exit(0)"
        )
        pids = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        left = [Path(f"/proc/{pid}/stat") for pid in pids.split()]
        deadline = time.monotonic() + 10
        while any(path.exists() and path.read_text().split()[2] != "Z" for path in left):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def by_itself(trace, sizes, card):
    """Allocated and reserved at most, of a card that shares its replay with no other."""
    room = card.memory_bytes - card.context_bytes_estimate
    for limits in ({"capacity_bytes": room, "device_bytes": card.memory_bytes}, {}):  # or of one that has enough
        allocator, blocks = CachingAllocator(**limits, **trace.allocator), {}
        begins, ends = ({at: one for one, at in enumerate(ats)} for ats in (trace.born, trace.died))
        with suppress(OutOfCapacity):
            for event in range(trace.events):
                if event in begins:
                    blocks[begins[event]] = allocator.malloc(int(sizes[begins[event]]))
                else:
                    allocator.free(blocks.pop(ends[event]))
            return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
    raise AssertionError("more than enough")


@pytest.mark.parametrize("techniques", [(), (Allocator(),)], ids=["plain", "expandable segments"])
def test_cards_share_a_replay_and_each_has_its_own_numbers(small, techniques):
    """Large ones, one that just has enough, some where cached segments are given back, some that are too small."""
    recipe = replace(small, techniques=techniques, sequence_length=128)
    trace, reserved = step.trace(recipe, T4), set()
    for part in (10.0, 2.0, 1.0, 0.999, 0.97, 0.94, 0.9, 0.8, 0.5):
        most = replay(trace, T4)["peak_reserved_bytes"]
        card = replace(T4, memory_bytes=T4.context_bytes_estimate + int(part * most))
        shared = replay(trace, card)
        alone = by_itself(trace, trace.sizes(card), card)
        assert (shared["peak_allocated_bytes"], shared["peak_reserved_bytes"]) == alone
        reserved.add(alone[1])
    assert len(reserved) > 1  # some gave segments back
