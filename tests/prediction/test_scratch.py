"""Scratch memory of reductions, as the shadow books it, against what PyTorch takes on an emulated GPU."""

import pytest
import torch

from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import call
from workbench.prediction.shadow.reductions import Reduction, reduction_of

pytestmark = pytest.mark.xdist_group("emulated")
CARDS = ("t4", "rtx4090", "a100-80gb", "b200")
NEGLIGIBLE = 2**19  # bytes
aten = torch.ops.aten
SUMS = [  # shape, dimensions
    ((4096, 768), (0,)), ((4096, 768), (1,)), ((4096, 3072), (0,)), ((8, 512, 768), (0, 1)), ((50257, 16), (0,)),
    ((4096,), ()), ((10_000_000,), ()), ((64, 64), (0,)), ((3, 100_000), (1,)), ((100_000, 3), (0,)), ((1, 7), (1,)),
]  # fmt: skip


def taken(function):
    """Bytes asked for at the peak of a call, beyond what its result keeps; on the card."""
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    asked = torch.cuda.memory_stats()
    assert kept.numel()
    return asked["requested_bytes.all.peak"] - asked["requested_bytes.all.current"]


def operations(device):
    """(operation, arguments): reductions of a training step, as autograd, losses and DoRA call them."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    calls = [(aten.mean.dim, (empty(4096, 768), [0]))]
    calls += [(aten.linalg_vector_norm.default, (empty(3072, 1024), 2, dims)) for dims in ([0], [1], None)]
    calls += [(aten.linalg_vector_norm.default, (empty(1024, 3072).T, 2, [1]))]
    for shape, dims in SUMS:
        calls += [(aten.sum.dim_IntList, (empty(*shape), dims)), (aten.sum.dim_IntList, (empty(*shape), dims, True))]
    return calls


def of_operations():
    return [taken(lambda op=op, args=args: op(*args)) for op, args in operations("cuda")]


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_reductions_of_a_step(subtests):
    for card in map(gpu, CARDS):
        real = call.call_on(card, of_operations, modules=("torch",))
        for (operation, args), nbytes in zip(operations("meta"), real, strict=True):
            with subtests.test(card=card.name, operation=str(operation), shape=str(args[0])[:60], dims=args[-1]):
                reduction = reduction_of(operation, args)
                if reduction:
                    assert sum(reduction.bytes_on(card)) == nbytes
                else:
                    assert nbytes <= NEGLIGIBLE


def test_what_is_no_reduction_of_floating_point_numbers_takes_nothing_of_its_own():
    assert reduction_of(aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2))) is None
    assert reduction_of(aten.sum.default, (torch.ones(4096, dtype=torch.int64),)) is None
    assert reduction_of(aten.sum.default, (torch.ones(4096, 768),)) is None
    assert reduction_of(aten.sum.dim_IntList, (torch.ones(8, 512, 768), [0, 1])) == Reduction(4096, 768)


def test_outputs_that_fill_a_gpu_need_no_buffer():
    t4 = gpu("t4")
    blocks = t4.multiprocessors * (t4.multiprocessor.threads // (32 * 4))  # of 32 × 4 threads, as many as run at once
    assert Reduction(4 * 256, 128 * blocks).bytes_on(t4) == (0, 0)
    assert min(Reduction(4 * 256 + 1, 128 * blocks).bytes_on(t4)) > 0
