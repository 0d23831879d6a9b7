"""What only a CUDA device can show. Skipped, with the reason, where there is none.

An emulated GPU is one: `python -m workbench emulate --gpu t4 -- python -m pytest -m gpu`. Tests that look at values are
skipped there, since it computes none.
"""

from dataclasses import replace

import pytest
import torch

from workbench.base.categories import Category
from workbench.base.device import current_emulated_gpu
from workbench.base.errors import ConfigurationError, OutOfMemoryError
from workbench.journal.record import Status, read_all
from workbench.techniques import GradientAccumulation, GradientCheckpointing, MixedPrecision
from workbench.training.run import run

pytestmark = pytest.mark.gpu
values = pytest.mark.values
SOURCE = f"emulated:{current_emulated_gpu()}" if current_emulated_gpu() else "cuda-allocator"


@pytest.fixture(scope="module")
def larger(recipe):
    """Large enough for the activations to matter beside the allocator's rounding."""
    return replace(recipe, effective_batch_size=16, sequence_length=128, steps=5)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    folder, done = tmp_path_factory.mktemp("gpu-runs"), {}

    def once(recipe):
        if recipe not in done:
            done[recipe] = run(recipe, device="cuda", folder=folder)
        return done[recipe]

    return once


@pytest.fixture
def peaks(monkeypatch):
    """Every peak that the allocator reports between two resets: (allocated, asked for). The first is of before."""
    seen, reset = [], torch.cuda.reset_peak_memory_stats

    def noted(*args):
        statistics = torch.cuda.memory_stats()
        seen.append(tuple(statistics[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested")))
        reset(*args)

    torch.cuda.empty_cache()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", noted)
    return seen


def test_the_peak_is_the_allocators(larger, peaks):
    """The largest of those that it reports is the record's."""
    record = run(larger, device="cuda")
    assert record.memory_source == SOURCE
    assert record.before_bytes + record.peak_allocated_bytes == max(peaks[1:])[0]
    assert record.peak_reserved_bytes >= record.before_bytes + record.peak_allocated_bytes


def test_the_categories_sum_to_the_peak(larger, on_gpu):
    record = on_gpu(larger)
    assert record.status is Status.OK
    assert sum(record.by_category.values()) == record.peak_allocated_bytes == max(record.by_phase.values())
    assert record.by_category[Category.WEIGHTS] == 4 * record.parameters


def test_what_belongs_to_no_tensor_is_cublas_workspaces_and_rounding(larger, peaks):
    """The rest is what kernels take for themselves while they run, such as sums over rows."""
    record = run(larger, device="cuda")
    allocated, asked_for = max(peaks[1:])
    in_use = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    workspaces = in_use - torch.cuda.memory_allocated()
    assert workspaces > 0
    rest = record.by_category[Category.UNATTRIBUTED] - workspaces - (allocated - asked_for)
    assert 0 <= rest < 0.001 * record.peak_allocated_bytes


def test_what_was_in_use_before_is_not_counted(larger, on_gpu):
    ballast = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    record = run(larger, device="cuda")
    assert record.before_bytes >= ballast.numel()
    assert record.peak_allocated_bytes == pytest.approx(on_gpu(larger).peak_allocated_bytes, rel=0.02)


def test_a_run_gives_its_memory_back(larger):
    run(larger, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    run(larger, device="cuda")
    assert torch.cuda.memory_allocated() <= before


def test_fp16_halves_what_the_matrix_products_save(larger, on_gpu):
    plain, mixed = on_gpu(larger), on_gpu(larger | MixedPrecision(dtype="fp16"))
    assert (mixed.status, mixed.dtype) == (Status.OK, "autocast fp16")
    assert mixed.maximum_by_category[Category.ACTIVATIONS] < plain.maximum_by_category[Category.ACTIVATIONS]


@values
def test_fp16_trains_with_loss_scaling(larger, on_gpu):
    plain, mixed = on_gpu(larger), on_gpu(larger | MixedPrecision(dtype="fp16"))
    assert mixed.losses != plain.losses
    assert mixed.losses[0] == pytest.approx(plain.losses[0], rel=0.01)
    assert mixed.held_out_loss < mixed.held_out_loss_before


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_lowers_the_peak(larger, on_gpu, use_reentrant):
    plain, saved = on_gpu(larger), on_gpu(larger | GradientCheckpointing(use_reentrant=use_reentrant))
    assert saved.maximum_by_category[Category.ACTIVATIONS] < plain.maximum_by_category[Category.ACTIVATIONS]
    assert saved.peak_allocated_bytes < plain.peak_allocated_bytes


@values
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_is_exact(larger, on_gpu, use_reentrant):
    plain, saved = on_gpu(larger), on_gpu(larger | GradientCheckpointing(use_reentrant=use_reentrant))
    # the gradient of the embedding is summed in no fixed order on CUDA
    assert saved.losses[0] == plain.losses[0]
    assert saved.losses == pytest.approx(plain.losses, rel=1e-4)


def test_gradient_accumulation_lowers_the_peak(larger, on_gpu):
    plain, split = on_gpu(larger), on_gpu(larger | GradientAccumulation(steps=4))
    assert split.peak_allocated_bytes < plain.peak_allocated_bytes


@values
def test_gradient_accumulation_is_exact(larger, on_gpu):
    plain, split = on_gpu(larger), on_gpu(larger | GradientAccumulation(steps=4))
    assert split.losses == pytest.approx(plain.losses, rel=1e-4)


def test_running_out_of_memory_is_recorded_and_gives_the_memory_back(larger):
    torch.cuda.empty_cache()
    before, total = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((before + 40 * 2**20) / total)
    try:
        with pytest.raises(OutOfMemoryError, match="did not fit into the memory of"):
            run(larger, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [record.status for record in read_all()] == [Status.OOM]
    assert torch.cuda.memory_allocated() <= before


def test_under_a_memory_cap_the_allocator_refuses_and_is_set_free_again(larger, on_gpu):
    cap = int(0.7 * on_gpu(larger).peak_reserved_bytes)
    with pytest.raises(OutOfMemoryError, match="did not fit into the memory cap of"):
        run(larger, device="cuda", memory_cap=cap)
    (record,) = read_all()
    assert (record.status, record.memory_cap_bytes) == (Status.OOM, cap)
    assert record.peak_reserved_bytes <= cap
    assert record.peak_phase
    assert record.requested_bytes > 0
    assert record.allocated_at_failure_bytes <= record.reserved_at_failure_bytes <= cap
    torch.empty(2 * cap, dtype=torch.uint8, device="cuda")


def test_a_memory_cap_that_is_large_enough_changes_no_number(larger, on_gpu):
    plain = on_gpu(larger)
    capped = run(larger, device="cuda", memory_cap=2 * plain.peak_reserved_bytes)
    assert capped.peak_allocated_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.02)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


@values
def test_under_a_memory_cap_the_loss_is_the_same_and_speed_is_known(larger, on_gpu):
    plain = on_gpu(larger)
    capped = run(larger, device="cuda", memory_cap=2 * plain.peak_reserved_bytes)
    assert capped.losses[0] == plain.losses[0]
    assert capped.timed_steps == plain.timed_steps > 0


def test_a_memory_cap_beyond_the_gpu_is_refused(larger):
    with pytest.raises(ConfigurationError, match="memory_cap: .* is more than the .* of this GPU"):
        run(larger, device="cuda", memory_cap="900TiB")
