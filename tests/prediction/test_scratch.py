"""Scratch memory of kernels, as the shadow books it, against what PyTorch takes on an emulated GPU."""

import pytest
import torch

from workbench.gpus.catalogue import gpu
from workbench.gpus.emulator import call
from workbench.prediction.shadow.kernels import scratch_of
from workbench.prediction.shadow.reductions import Reduction, Splits

pytestmark = pytest.mark.xdist_group("emulated")
AMPERE_AND_LATER = ("rtx4090", "a100-80gb", "b200")
aten = torch.ops.aten
SUMS = [  # shape, dimensions
    ((4096, 768), (0,)), ((4096, 768), (1,)), ((4096, 3072), (0,)), ((8, 512, 768), (0, 1)), ((50257, 16), (0,)),
    ((4096,), ()), ((10_000_000,), ()), ((64, 64), (0,)), ((3, 100_000), (1,)), ((100_000, 3), (0,)), ((1, 7), (1,)),
]  # fmt: skip
ATTENTION = [(1, 12, 1024, 64), (4, 12, 1024, 64), (2, 16, 512, 128), (1, 12, 200, 64), (1, 1, 4096, 80)]


def taken(function):
    """Bytes asked for at the peak of a call, beyond what its result keeps; on the card."""
    torch.cuda.reset_peak_memory_stats()
    kept = function()
    asked = torch.cuda.memory_stats()
    assert kept.numel() if isinstance(kept, torch.Tensor) else kept
    return asked["requested_bytes.all.peak"] - asked["requested_bytes.all.current"]


def of_sums():
    tensors = [(torch.empty(shape, device="cuda"), dims) for shape, dims in SUMS]
    return [taken(lambda x=x, dims=dims: x.sum(dims or None)) for x, dims in tensors]


def of_attention():
    sizes = []
    for shape in ATTENTION:
        q, k, v = (torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        sizes.append(taken(lambda q=q, k=k, v=v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)))
    return sizes


def operations(device):
    """(operation, arguments): what a training step calls that takes scratch of a size that the shape alone decides."""

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device=device)

    half, row = torch.bfloat16, torch.zeros(4, 1024, dtype=torch.int64, device=device)
    calls = [
        (aten.embedding_dense_backward.default, (empty(4, 1024, 768), row, 50257, -1, False)),
        (aten.embedding_dense_backward.default, (empty(2, 1024, 768), row[:2], 50257, -1, False)),
        (aten.embedding_dense_backward.default, (empty(4, 1024, 768, dtype=half), row, 50257, -1, False)),
        (aten._softmax_backward_data.default, (empty(4, 12, 256, 256), empty(4, 12, 256, 256), -1, torch.float32)),
        (aten._foreach_norm.Scalar, ([empty(1000, 768), empty(768), empty(50257, 768)], 2)),
        (aten._foreach_norm.Scalar, ([empty(1000, 768, dtype=half), empty(768, dtype=half)], 2)),
        (aten.sum.dim_IntList, (row, [1])),
        (aten.sum.dim_IntList, (row.bool(), [1])),
        (aten.cumsum.default, (row, -1)),
        (aten.cumsum.default, (row.bool(), -1)),
        (aten.mean.dim, (empty(4096, 768), [0])),
        *((aten.linalg_vector_norm.default, (empty(3072, 1024), 2, dims)) for dims in ([0], [1], None)),
        (aten.linalg_vector_norm.default, (empty(1024, 3072).T, 2, [1])),  # as DoRA takes them
    ]
    for kind, dtype in (
        (aten._scaled_dot_product_flash_attention, half),
        (aten._scaled_dot_product_efficient_attention, half),
        (aten._scaled_dot_product_efficient_attention, torch.float32),
    ):
        joined = empty(4, 1024, 3, 12, 64, dtype=dtype)  # as GPT-2 has them
        calls += backward_of(kind, *(part.transpose(1, 2) for part in joined.unbind(2)))
    apart = [empty(4, 12, 1024, 64, dtype=half) for _ in range(3)]  # as rotary embeddings leave them
    return calls + backward_of(aten._scaled_dot_product_flash_attention, *apart)


def backward_of(kind, query, key, value):
    efficient = kind is aten._scaled_dot_product_efficient_attention
    out = kind(query, key, value, None, True, 0.1, True) if efficient else kind(query, key, value, 0.1, True)
    gradient = torch.empty_like(out[0])
    if efficient:
        return [
            (aten._scaled_dot_product_efficient_attention_backward.default,
             (gradient, query, key, value, None, *out[:4], 0.1, [True, True, True, False], True)),
        ]  # fmt: skip
    return [
        (aten._scaled_dot_product_flash_attention_backward.default,
         (gradient, query, key, value, *out[:6], 0.1, True, *out[6:8])),
    ]  # fmt: skip


def of_operations():
    return [taken(lambda op=op, args=args: op(*args)) for op, args in operations("cuda")]


def predicted(scratch, card):
    """Bytes at the peak: what an operation takes before it makes its result, and the largest group after that."""

    def nbytes(block):
        return block if isinstance(block, int) else sum(block.bytes_on(card))

    groups = [sum(map(nbytes, group)) for group in scratch.after]
    return sum(map(nbytes, scratch.before)) + max(groups, default=0)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_sums(subtests):
    for card in map(gpu, ("t4", *AMPERE_AND_LATER)):
        real = call.call_on(card, of_sums, modules=("torch",))
        for (shape, dims), nbytes in zip(SUMS, real, strict=True):
            with subtests.test(card=card.name, shape=shape, dims=dims):
                reduction = Reduction.of(torch.empty(shape, device="meta"), dims)
                assert sum(reduction.bytes_on(card)) == nbytes


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_operations_of_a_step(subtests):
    for card in map(gpu, AMPERE_AND_LATER):
        real = call.call_on(card, of_operations, modules=("torch",))
        for (operation, args), nbytes in zip(operations("meta"), real, strict=True):
            with subtests.test(card=card.name, operation=str(operation), shape=str(args[0])[:60]):
                assert predicted(scratch_of(operation, args, {}), card) == nbytes


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_attention_without_dropout_is_split_where_multiprocessors_would_idle(subtests):
    for card in map(gpu, AMPERE_AND_LATER):
        real = call.call_on(card, of_attention, modules=("torch",))
        for (batch, heads, tokens, width), nbytes in zip(ATTENTION, real, strict=True):
            with subtests.test(card=card.name, batch=batch, heads=heads, tokens=tokens, width=width):
                splits = Splits(batch * heads, tokens, tokens, width)
                assert sum(splits.bytes_on(card)) == nbytes


def test_with_dropout_it_is_never_split():
    tensor = torch.empty(1, 12, 1024, 64, dtype=torch.bfloat16, device="meta")
    flash = aten._scaled_dot_product_flash_attention.default
    assert scratch_of(flash, (tensor, tensor, tensor, 0.1), {}).after == ()
    (split,) = scratch_of(flash, (tensor, tensor, tensor), {}).after[0]
    assert split.bytes_on(gpu("rtx4090")) == (4 * 12 * 1024 * 4, 4 * 12 * 1024 * 64 * 4)
    assert split.bytes_on(gpu("a100-80gb")) == (0, 0)
