"""nanochat's pretraining, compiled, on one card: a GPT of so many layers under bf16 autocast, Muon and fused AdamW.

Source: reports that nanochat writes of its runs ("Peak memory usage", `torch.cuda.max_memory_allocated()`), with its
commit, card and PyTorch; https://github.com/karpathy/nanochat at that commit has the model and the training, which
stand here in our own words. Texts are random tokens of its vocabulary of 65,536; a step is 524,288 of them, in
micro-batches of 2,048 tokens a row; three steps are taken, after the third of which nothing grows, and before them
the losses of one micro-batch without gradients. Its learning rates, samples and saved weights are left out.

Under torchrun, also with a single process, it takes the optimizers that share their work among the ranks. They wait
for the futures of their collectives and never for the works, so PyTorch keeps what these hold, the gradients and a
flat copy of each list, until the next step's first collective: with 20 layers 5 GiB at the peak.

    python nanochat.py 10 8      # layers, rows in a micro-batch
    torchrun --nproc-per-node 8 nanochat.py 20 32
"""

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from card import peaks
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 65536
LENGTH = 2048
HEAD = 128
TOKENS_A_STEP = 524288
STEPS = 3


def main() -> None:
    layers = int(sys.argv[1])
    rows = int(sys.argv[2])
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # nanochat sets it too
    # the first run of a kernel times it, on copies of what it changes: a run that finds it timed may take less
    # the ranks of one torchrun share what was compiled
    compiled_files = Path(tempfile.gettempdir()) / f"nanochat-{os.getppid()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled_files)
    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device)
    try:
        measured = train(layers, rows)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps(measured))
    finally:
        if is_last():
            shutil.rmtree(compiled_files, ignore_errors=True)
        if dist.is_initialized():
            dist.destroy_process_group()


def is_last() -> bool:
    """Whether this rank ends last.

    Emulated ranks do not wait for one another, so others may still compile; they meet in PyTorch's store only.
    """
    if not dist.is_initialized():
        return True
    ended = dist.distributed_c10d._get_default_store().add("ended", 1)
    return ended == dist.get_world_size()


def train(layers: int, rows: int) -> dict[str, int]:
    torch.set_float32_matmul_precision("high")
    autocast = torch.amp.autocast("cuda", dtype=torch.bfloat16)
    with torch.device("meta"):
        model = Gpt(layers)
    model.to_empty(device="cuda")
    model.finish()
    compiled = torch.compile(model, dynamic=False)
    both_optimizers = optimizers(model)
    bytes_a_token = torch.ones(VOCABULARY, dtype=torch.int32, device="cuda")
    inputs, targets = batch(rows)

    compiled.eval()
    evaluated, their_targets = batch(rows)  # nanochat's loader keeps these
    with torch.no_grad(), autocast:
        losses = compiled(evaluated, their_targets, reduction="none").view(-1)
        losses = (losses * (bytes_a_token[their_targets.view(-1)] > 0)).sum()

    compiled.train()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    micro_batches = TOKENS_A_STEP // (rows * LENGTH * ranks)
    for _ in range(STEPS):
        for _ in range(micro_batches):
            with autocast:
                loss = compiled(inputs, targets)
            (loss / micro_batches).backward()
            inputs, targets = batch(rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in both_optimizers:
            optimizer.step()
        compiled.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    return peaks()


def optimizers(model: "Gpt") -> list[torch.optim.Optimizer]:
    ends = [
        {"params": list(model.head.parameters())},
        {"params": list(model.embedding.parameters())},
    ]
    matrices = list(model.blocks.parameters())
    if dist.is_initialized():
        return [SharedAdamW(ends), SharedMuon(matrices)]
    adamw = torch.optim.AdamW(
        ends,
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        fused=True,
    )
    return [adamw, Muon(matrices)]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    """Return a batch as nanochat loads it: pinned on the host, then on the card."""
    tokens = torch.empty(rows * LENGTH + 1, dtype=torch.int64, pin_memory=True)
    inputs = tokens[:-1].to(torch.int32).view(rows, LENGTH)
    inputs = inputs.to("cuda", torch.int32, non_blocking=True)
    targets = tokens[1:].view(rows, LENGTH)
    targets = targets.to("cuda", torch.int64, non_blocking=True)
    return inputs, targets


def norm(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[3] // 2
    first = x[..., :half]
    second = x[..., half:]
    turned_first = first * cos + second * sin
    turned_second = first * (-sin) + second * cos
    return torch.cat([turned_first, turned_second], 3).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, HEAD)
        query = self.query(x).view(shape)
        key = self.key(x).view(shape)
        value = self.value(x).view(shape)
        query = rotate(query, cos, sin)
        key = rotate(key, cos, sin)
        query = norm(query)
        key = norm(key)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = value.transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(norm(x), cos, sin)
        return x + self.down(functional.relu(self.up(norm(x))).square())


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        width = 64 * layers
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def finish(self) -> None:
        """Finish the model once its weights are on the card.

        Embeddings get half precision, and rotations are made for ten times the length.
        """
        frequencies = 1.0 / 10000 ** (torch.arange(0, HEAD, 2, dtype=torch.float32, device="cuda") / HEAD)
        angles = torch.outer(
            torch.arange(10 * LENGTH, dtype=torch.float32, device="cuda"),
            frequencies,
        )
        cos = angles.cos().bfloat16()
        self.register_buffer("cos", cos[None, :, None, :], persistent=False)
        sin = angles.sin().bfloat16()
        self.register_buffer("sin", sin[None, :, None, :], persistent=False)
        self.embedding.to(torch.bfloat16)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor,
        reduction: str = "mean",
    ) -> Tensor:
        length = tokens.shape[1]
        cos = self.cos[:, :length]
        sin = self.sin[:, :length]
        x = norm(self.embedding(tokens))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(norm(x))
        logits = (15 * torch.tanh(logits / 15)).float()
        return functional.cross_entropy(
            logits.view(-1, logits.size(-1)),
            targets.view(-1),
            ignore_index=-1,
            reduction=reduction,
        )


@torch.compile
def orthogonal(gradient: Tensor, steps: int) -> Tensor:
    """Make a gradient orthogonal by Newton and Schulz's iteration in half precision."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = gradient.bfloat16()
    if gradient.size(-2) > gradient.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    if gradient.size(-2) > gradient.size(-1):
        x = x.mT
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, weights: list[Tensor]) -> None:
        by_size: dict[int, list[Tensor]] = {}
        for weight in weights:
            by_size.setdefault(weight.numel(), []).append(weight)
        groups = [{"params": same_size} for same_size in by_size.values()]
        super().__init__(groups, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                update(weight, self.state[weight], group)


def update(weight: Tensor, state: dict, group: dict) -> None:
    """Update one weight as Muon does."""
    gradient = weight.grad
    if not state:
        state["momentum"] = torch.zeros_like(gradient)
    state["momentum"].lerp_(gradient, 1 - group["momentum"])
    gradient = gradient.lerp_(state["momentum"], group["momentum"])
    direction = orthogonal(gradient, 5)
    rows, columns = weight.shape
    stretch = math.sqrt(max(1, rows / columns))
    weight.add_(direction, alpha=-group["lr"] * stretch)


class SharedMuon(torch.optim.Optimizer):
    """Muon whose work is shared: of as many weights of one shape as there are ranks, each rank updates one."""

    def __init__(self, weights: list[Tensor]) -> None:
        groups = []
        for shape in sorted({weight.shape for weight in weights}):
            alike = [weight for weight in weights if weight.shape == shape]
            groups.append({"params": alike, "filler": torch.zeros_like(alike[0])})
        super().__init__(groups, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self) -> None:
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        turns = []
        for group in self.param_groups:
            for first in range(0, len(group["params"]), ranks):
                weights = group["params"][first : first + ranks]
                # a filler stands in for missing weights if fewer are left than there are ranks
                missing = ranks - len(weights)
                mine = weights[rank] if rank < len(weights) else None
                gradients = [weight.grad for weight in weights]
                gradients += [group["filler"]] * missing
                result = torch.empty_like(group["filler"]) if mine is None else mine.grad
                work = dist.reduce_scatter(
                    result,
                    gradients,
                    op=dist.ReduceOp.AVG,
                    async_op=True,
                )
                turns.append((group, weights, missing, mine, work.get_future()))
        gathered = []
        for group, weights, missing, mine, averaged in turns:
            averaged.wait()
            if mine is not None:
                update(mine, self.state[mine], group)
            results = weights + [torch.empty_like(group["filler"]) for _ in range(missing)]
            sent = group["filler"] if mine is None else mine
            gathered.append(dist.all_gather(results, sent, async_op=True).get_future())
        torch.futures.collect_all(gathered).wait()


class SharedAdamW(torch.optim.Optimizer):
    """AdamW whose work is shared: each rank has the states of its rows of each weight, and updates these."""

    def __init__(self, groups: list[dict]) -> None:
        defaults = {"lr": 0.004, "betas": (0.8, 0.95), "eps": 1e-10}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self) -> None:
        turns = []
        for group in self.param_groups:
            for weight in group["params"]:
                gradient = torch.empty_like(rows_of_rank(weight.grad))
                work = dist.reduce_scatter_tensor(
                    gradient,
                    weight.grad,
                    op=dist.ReduceOp.AVG,
                    async_op=True,
                )
                turns.append((group, weight, gradient, work.get_future()))
        gathered = []
        for group, weight, gradient, averaged in turns:
            averaged.wait()
            rows = rows_of_rank(weight)
            state = self.state[weight]
            if not state:
                state["average"] = torch.zeros_like(rows)
                state["square"] = torch.zeros_like(rows)
            first, second = group["betas"]
            state["average"].lerp_(gradient, 1 - first)
            state["square"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
            rows.addcdiv_(
                state["average"],
                state["square"].sqrt().add_(group["eps"]),
                value=-group["lr"],
            )
            gathered.append(dist.all_gather_into_tensor(weight, rows, async_op=True).get_future())
        torch.futures.collect_all(gathered).wait()


def rows_of_rank(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


if __name__ == "__main__":
    main()
