from dataclasses import replace

import pytest
import torch

from workbench.base.categories import Category
from workbench.techniques import Lora, OptimizerOffloading
from workbench.techniques.offloading import DiskFile
from workbench.techniques.optimizer_offloading import streaming_adamw
from workbench.training.run import run

ON_DISK = OptimizerOffloading(to="disk", chunk_elements=2**14)


def test_of_the_states_the_step_counters_stay(recipe, fine_tuned):
    plain, moved = fine_tuned(recipe), fine_tuned(recipe | ON_DISK)
    tensors = 4 + 12 * 2  # embeddings and last LayerNorm, 12 tensors a block; each has a step counter of 4 bytes
    assert moved.maximum_by_category[Category.OPTIMIZER_STATES] == 4 * tensors
    assert plain.by_phase["optimizer_step"] - moved.by_phase["optimizer_step"] > 6 * plain.parameters


def test_the_record_says_what_lay_on_the_disk_and_what_moved(recipe, fine_tuned):
    moved = fine_tuned(recipe | ON_DISK)
    assert moved.peak_disk_bytes == 8 * moved.parameters
    # both moments there and back in every step, but that nothing is fetched for the first
    assert moved.moved_bytes == (recipe.steps * 16 - 8) * moved.parameters
    assert moved.peak_host_bytes is None


def test_with_lora_only_the_adapters_states_move(recipe, fine_tuned):
    moved = fine_tuned(replace(recipe, steps=1) | Lora(rank=4) | ON_DISK)
    assert moved.peak_disk_bytes == 8 * moved.trainable_parameters


def test_a_smaller_chunk_needs_less_at_once(recipe, fine_tuned):
    large, small = (
        fine_tuned(replace(recipe, steps=1) | replace(ON_DISK, chunk_elements=n)).by_phase["optimizer_step"]
        for n in (2**18, 2**12)
    )
    assert large - small == pytest.approx(2 * 4 * (2**18 - 2**12), rel=0.1)


def test_the_steps_are_those_of_torchs_adamw(subtests):
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    for dtype in (torch.float32, torch.bfloat16):
        with subtests.test(dtype=dtype):
            torch.manual_seed(0)
            ours = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((64, 33), (7,))]
            theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
            streaming = streaming_adamw(DiskFile(), 100, fused=False)(ours, **options)
            known = torch.optim.AdamW(theirs, foreach=False, **options)
            for _ in range(5):
                for one, other in zip(ours, theirs, strict=True):
                    one.grad = torch.randn_like(one)
                    other.grad = one.grad.clone()
                streaming.step()
                known.step()
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other)


def test_a_checkpoint_without_its_states_is_refused():
    weight = torch.nn.Parameter(torch.ones(4))
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = streaming_adamw(DiskFile(), 100, fused=False)([weight], **options)
    assert optimizer.state_dict()["state"] == {}
    weight.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(NotImplementedError, match="cannot be saved in a checkpoint"):
        optimizer.state_dict()


@pytest.mark.gpu
@pytest.mark.values
def test_to_pinned_memory_it_finds_the_same_losses(recipe):
    plain, moved = run(recipe, device="cuda"), run(recipe | OptimizerOffloading(), device="cuda")
    assert moved.losses == pytest.approx(plain.losses, rel=1e-5)


@pytest.mark.gpu
def test_in_pinned_memory_the_moments_take_none_of_the_device(recipe):
    moved = run(recipe | OptimizerOffloading(), device="cuda")
    assert moved.peak_host_bytes == 8 * moved.parameters
    assert moved.maximum_by_category[Category.OPTIMIZER_STATES] < 1000
