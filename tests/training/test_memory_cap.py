"""`run(…, memory_cap=…)` on the CPU: what fits runs as if there were no cap, what does not is told truly."""

import gc
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.base.categories import Category, Phase
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.journal.record import Status, read_all
from workbench.measure.allocators import cap_memory, live_tensor_bytes
from workbench.techniques import GradientAccumulation
from workbench.training.run import run


@pytest.fixture(scope="module")
def short(recipe):
    """Five steps: two of them beyond the warm-up, in which the tracker would be off without a cap."""
    return replace(recipe, steps=5)


@pytest.fixture(scope="module")
def plain(short, fine_tuned):
    return fine_tuned(short)


def failed(recipe, cap, folder):
    with pytest.raises(OutOfMemoryError) as caught:
        run(recipe, device="cpu", memory_cap=cap, folder=folder)
    (record,) = read_all(folder)
    assert (record.status, record.memory_cap_bytes) == (Status.OOM, cap)
    return record, caught.value


def test_a_run_at_its_own_peak_fits_and_learns_the_same(short, plain):
    record = run(short, device="cpu", memory_cap=plain.peak_allocated_bytes)
    assert record.status is Status.OK
    assert record.memory_cap_bytes == plain.peak_allocated_bytes == record.peak_allocated_bytes
    assert record.losses == plain.losses
    assert record.held_out_loss == plain.held_out_loss
    assert (record.by_phase, record.by_category) == (plain.by_phase, plain.by_category)
    # the tracker costs time, so no speed is recorded
    assert plain.timed_steps == 2
    assert (record.timed_steps, record.step_time_s, record.tokens_per_s) == (0, None, None)


def test_one_byte_less_does_not_fit_the_record_says_where_and_nothing_stays(short, plain, runs_folder):
    cap = plain.peak_allocated_bytes - 1
    gc.collect()
    before = live_tensor_bytes("cpu")
    record, error = failed(short, cap, runs_folder)
    assert error.__context__ is None
    assert live_tensor_bytes("cpu") - before < 100_000  # nothing was collected here; the model alone has 1.5 MB
    assert _get_current_dispatch_mode_stack() == []
    assert record.peak_phase == plain.peak_phase
    assert record.peak_allocated_bytes == cap + 1  # what the operation that failed would have needed
    assert record.by_category == plain.by_category
    assert sum(record.by_category.values()) == record.peak_allocated_bytes
    assert record.steps_done == 1  # the states of the optimizer exist from the second step on
    assert f"baseline did not fit into the memory cap of {cap / 2**20:.1f} MiB" in str(error)
    assert "Use a smaller effective_batch_size" in str(error)


def test_it_fails_in_the_first_phase_that_needs_more(short, plain, tmp_path, subtests):
    for phase in Phase:
        with subtests.test(phase=phase):
            cap = plain.by_phase[phase] - 1
            record, _ = failed(short, cap, tmp_path / phase)
            assert record.by_phase[record.peak_phase] > cap
            assert all(nbytes <= cap for name, nbytes in record.by_phase.items() if name != record.peak_phase)


def test_weights_alone_beyond_the_cap_fail_in_the_evaluation_before_training(short, plain, runs_folder):
    weights = plain.by_category[Category.WEIGHTS]
    record, _ = failed(short, weights - 1, runs_folder)
    assert record.peak_phase == Phase.EVALUATION
    assert record.by_category[Category.WEIGHTS] == weights
    assert record.steps_done == 0


def test_what_fails_alone_fits_with_a_technique(short, fine_tuned):
    alone = replace(short, steps=2)
    split = alone | GradientAccumulation(steps=4)
    cap = (fine_tuned(alone).peak_allocated_bytes + fine_tuned(split).peak_allocated_bytes) // 2
    assert run(split, device="cpu", memory_cap=cap).status is Status.OK
    with pytest.raises(OutOfMemoryError):
        run(alone, device="cpu", memory_cap=cap)


def test_reuse_does_not_mix_caps(short):
    short = replace(short, steps=1)
    first = run(short, device="cpu", memory_cap="1GiB", reuse=True)
    assert run(short, device="cpu", memory_cap=2**30, reuse=True).id == first.id
    assert run(short, device="cpu", memory_cap="2GiB", reuse=True).id != first.id
    assert run(short, device="cpu", reuse=True).memory_cap_bytes is None


def test_an_unclear_cap_is_refused_with_nothing_recorded(short, runs_folder, subtests):
    for cap in ("8", "8 G", 0, "lots"):
        refused = pytest.raises(ConfigurationError, match="memory_cap: .* is not an amount of memory")
        with subtests.test(cap=cap), refused:
            run(short, device="cpu", memory_cap=cap)
    assert read_all(runs_folder) == []


@pytest.mark.parametrize(("device", "index"), [("cuda", 2), ("cuda:1", 1)])
def test_on_cuda_the_fraction_is_set_and_set_back(monkeypatch, device, index):
    """Without a GPU: PyTorch's own functions, and below them, what the library would be told of which GPU."""
    calls = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: 0.9, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_setMemoryFraction", lambda *call: calls.append(call), raising=False)
    with cap_memory(torch.device(device), None):
        assert calls == []
    with suppress(ZeroDivisionError), cap_memory(torch.device(device), 250):
        assert calls == [(0.25, index)]
        raise ZeroDivisionError
    assert calls == [(0.25, index), (0.9, index)]
