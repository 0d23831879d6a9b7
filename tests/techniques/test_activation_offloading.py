import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from workbench.base.categories import Category
from workbench.techniques import ActivationOffloading, GradientCheckpointing
from workbench.techniques.activation_offloading import SavedTensors
from workbench.techniques.offloading import DiskFile
from workbench.training.run import run

ON_DISK = ActivationOffloading(to="disk", minimum_bytes=4096)


def test_the_record_says_what_lay_on_the_disk(recipe, fine_tuned):
    plain, moved = fine_tuned(recipe), fine_tuned(recipe | ON_DISK)
    saved = plain.maximum_by_category[Category.ACTIVATIONS] - moved.maximum_by_category[Category.ACTIVATIONS]
    # beside the activations, the logits' log-softmax goes too
    logits = 4 * 8 * 32 * 4096
    assert saved <= moved.peak_disk_bytes <= saved + logits + 8 * 32 * 64 * 4
    # each storage goes once; one that two operations need one after the other comes back twice: the log-softmax, for
    # the loss's gradient and its own, and in both blocks the attention's output, for c_proj and the attention
    again = logits + 2 * 4 * 8 * 32 * 64
    assert moved.moved_bytes == recipe.steps * (2 * moved.peak_disk_bytes + again)
    assert moved.peak_host_bytes is None
    assert (plain.peak_disk_bytes, plain.peak_host_bytes, plain.moved_bytes) == (None, None, None)


def test_with_checkpointing_the_inputs_of_the_blocks_go(recipe, fine_tuned):
    unit = 4 * 8 * 32 * 64  # (B, T, C) in fp32
    alone = fine_tuned(recipe | ON_DISK).peak_disk_bytes
    both = fine_tuned(replace(recipe, steps=1) | GradientCheckpointing() | ON_DISK).peak_disk_bytes
    assert both < alone
    assert both - 4 * 8 * 32 * 4096 == 4 * unit  # two blocks, the last LayerNorm, the output matrix; and the loss


def test_small_tensors_stay(recipe, fine_tuned):
    everything, some, only_logits = (
        fine_tuned(replace(recipe, steps=1) | replace(ON_DISK, minimum_bytes=minimum)).peak_disk_bytes
        for minimum in (0, 4096, 2**21)
    )
    assert only_logits == 4 * 8 * 32 * 4096
    assert only_logits < some < everything


def test_a_tensor_of_exactly_the_minimum_goes():
    saved = SavedTensors([], 400, None)
    assert not saved.stays(torch.empty(100))
    assert saved.stays(torch.empty(99))


@pytest.fixture
def written():
    return []


@pytest.fixture
def hooks(written):
    """Hooks that keep `weight` and write to a real file, noting the sizes of what they write."""
    weight = torch.nn.Parameter(torch.randn(8, 24))

    class Noted(DiskFile):
        def store(self, room, start, data):
            written.append(len(data))
            super().store(room, start, data)

    return weight, SavedTensors([weight], 0, Noted())


def test_weights_are_never_copied_and_a_shared_storage_goes_once(hooks, written):
    weight, saved = hooks
    x = torch.randn(4, 8, requires_grad=True)

    def forward():
        one, two, three = (x @ weight).split(8, dim=1)
        return (one * two + two * three).sum()

    forward().backward()
    expected = [x.grad.clone(), weight.grad.clone()]
    x.grad = weight.grad = None
    with saved_tensors_hooks(saved.pack, saved.unpack):
        loss = forward()
    assert sorted(written) == [4 * 8 * 4, 4 * 24 * 4]  # x, and the three parts of the product as one
    loss.backward()
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_torchs_own_hook_does_copy_the_weights():
    """Why `save_on_cpu` is not used: it packs `weight` too, and each view by itself."""
    weight, packed = torch.nn.Parameter(torch.randn(8, 24)), []
    with saved_tensors_hooks(lambda t: packed.append(t.untyped_storage()._cdata), lambda t: t):
        torch.randn(4, 8, requires_grad=True) @ weight
    assert weight.untyped_storage()._cdata in packed


def test_a_storage_changed_in_place_between_two_savings_is_written_twice(hooks, written):
    _, saved = hooks
    memory = torch.ones(3)
    first = saved.pack(memory)
    memory.mul_(2)
    second = saved.pack(memory)
    assert written == [12, 12]
    assert saved.unpack(first).tolist() == [1, 1, 1]
    assert saved.unpack(second).tolist() == [2, 2, 2]


def test_a_result_that_stays_does_not_keep_its_operation(hooks):
    """Of which it would be a part for ever where no backward pass comes, as with DoRA's norm, a constant."""
    _, saved = hooks
    saved.minimum_bytes = 2**20
    with saved_tensors_hooks(saved.pack, saved.unpack):
        norm = torch.randn(3, 3, requires_grad=True).norm(dim=1)  # saves its own result
    result = weakref.ref(norm)
    del norm
    gc.collect()
    assert result() is None


def test_an_address_used_again_is_not_mistaken_for_the_old_storage(hooks):
    _, saved = hooks
    packed = [saved.pack(torch.full((1000,), float(i))) for i in range(50)]  # each is freed before the next is made
    assert [saved.unpack(entry)[0].item() for entry in packed] == list(range(50))


def test_every_type_and_layout_comes_back_as_it_was(hooks, subtests):
    _, saved = hooks
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        with subtests.test(dtype=dtype):
            tensor = torch.randint(0, 2, (6, 5)).to(dtype).t()[1:, ::2]
            back = saved.unpack(saved.pack(tensor))
            assert torch.equal(back, tensor)
            assert back.stride() == tensor.stride()
            assert back.dtype == dtype


@pytest.fixture(scope="module")
def on_gpu(recipe, tmp_path_factory):
    """Without, and with the activations in pinned memory."""
    folder = tmp_path_factory.mktemp("gpu-runs")
    return [run(chosen, device="cuda", folder=folder) for chosen in (recipe, recipe | ActivationOffloading())]


@pytest.mark.gpu
@pytest.mark.values
def test_to_pinned_memory_it_is_exact_too(on_gpu):
    plain, moved = on_gpu
    assert moved.losses == plain.losses


@pytest.mark.gpu
def test_in_pinned_memory_activations_take_none_of_the_device(on_gpu):
    plain, moved = on_gpu
    assert moved.peak_host_bytes > 0
    assert moved.maximum_by_category[Category.ACTIVATIONS] < 0.5 * plain.maximum_by_category[Category.ACTIVATIONS]
