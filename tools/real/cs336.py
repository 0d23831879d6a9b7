"""The transformer of Stanford's course CS336, as a student measured it: memory snapshots, and attention alone.

Source: https://github.com/Wedsonlin/assignment2-systems: `cs336_systems/nsys_profile.py` (what is recorded) and the
snapshots in `results`; `cs336_systems/attention_benchmark.py` and `results/attention_benchmark.jsonl`. The model and
its AdamW are the course's own, written out with einsum and without fused kernels; here they stand in our words.

`inference` and `training` are of the medium model (24 layers of 1,024) with 4 rows of so many tokens: five steps, then
one that is recorded, with `bf16` under autocast. `attention` prints what is allocated after a forward pass of 8 rows,
for every length and width.

    python cs336.py inference 128
    python cs336.py training 512 bf16
    python cs336.py attention eager
"""

import gc
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable

import torch
from card import print_layout
from torch import Tensor, nn

VOCABULARY = 10_000
WIDTH = 1024
LAYERS = 24
HEADS = 16
INNER = 4096
ROWS = 4
WARM_UP_STEPS = 5
ATTENTION_LENGTHS = (256, 1024, 4096, 8192, 16384)
ATTENTION_WIDTHS = (16, 32, 64, 128)
ATTENTION_ROWS = 8


def main() -> None:
    if sys.argv[1] == "attention":
        attention(sys.argv[2])
        return
    length = int(sys.argv[2])
    is_half = "bf16" in sys.argv
    model = Transformer(length).cuda()
    if sys.argv[1] == "inference":
        infer(model, length, is_half)
    else:
        train(model, length, is_half)


def infer(model: nn.Module, length: int, is_half: bool) -> None:
    warm_up = tokens(WARM_UP_STEPS, length)
    recorded = tokens(1, length)
    model.eval()
    with torch.inference_mode():
        for row in warm_up:
            with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
                model(row)
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
            model(recorded[0])
        print_layout()


def train(model: nn.Module, length: int, is_half: bool) -> None:
    optimizer = AdamW(model.parameters())
    warm_up = tokens(WARM_UP_STEPS, length)
    recorded = tokens(1, length)
    warm_up_targets = tokens(WARM_UP_STEPS, length)
    recorded_targets = tokens(1, length)
    for row, targets in zip(warm_up, warm_up_targets, strict=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
            logits = model(row)
            loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    with torch.autocast("cuda", torch.bfloat16, enabled=is_half):
        logits = model(recorded[0])
        loss = cross_entropy(logits, recorded_targets[0])
    loss.backward()
    optimizer.step()
    print_layout()


def tokens(steps: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (steps, ROWS, length), device="cuda")


def attention(kind: str) -> None:
    """Go forward and backward as the source, which keeps the warm-up's last output, and the graph of the last pass."""
    function: Callable[..., Tensor] = attend
    if kind == "compiled":
        function = torch.compile(attend)
        torch._functorch.config.donated_buffer = False
    for length, width in itertools.product(ATTENTION_LENGTHS, ATTENTION_WIDTHS):
        shape = (ATTENTION_ROWS, length, width)
        inputs = [torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3)]
        gradient = torch.randn_like(inputs[0])
        for _ in range(5):
            warm_up_output = function(*inputs)
            warm_up_output.backward(gradient)
            for tensor in inputs:
                tensor.grad = None
        torch.cuda.empty_cache()
        for _ in range(10):
            function(*inputs)
        torch.cuda.empty_cache()
        output = function(*inputs)
        allocated = torch.cuda.memory_allocated()
        print(json.dumps({"run": [length, width], "allocated": allocated}), flush=True)
        for _ in range(10):
            output.backward(gradient, retain_graph=True)
        del inputs, gradient
        gc.collect()
        torch.cuda.empty_cache()


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        frequencies = 10_000 ** -(torch.arange(0, width, 2) / width)
        angles = torch.einsum("t,f->tf", torch.arange(length), frequencies)
        table = torch.stack((angles.cos(), angles.sin()))
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.reshape(*x.shape[:-1], -1, 2).movedim(-1, 0)
        first, second = pairs.unbind(0)
        cos, sin = self.table[:, : x.shape[-2], :].unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        return torch.concat((turned_first, turned_second), dim=-1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.query = Linear(WIDTH, WIDTH)
        self.key = Linear(WIDTH, WIDTH)
        self.value = Linear(WIDTH, WIDTH)
        self.out = Linear(WIDTH, WIDTH)
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        count, length, _ = x.shape
        # the order in which operations are written is the order in which autograd goes back, and asks for memory
        queries = self.query(x)
        keys = self.key(x)
        values = self.value(x)
        query = in_heads(queries)
        key = in_heads(keys)
        value = in_heads(values)
        del queries, keys, values
        query = self.rotation(query)
        key = self.rotation(key)
        places = torch.arange(length, device=x.device)
        mask = places[:, None] >= places[None, :]
        attended = attend(query, key, value, mask[None, None])
        attended = attended.transpose(1, 2).reshape(count, length, WIDTH).contiguous()
        return self.out(attended)


def in_heads(x: Tensor) -> Tensor:
    count, length, _ = x.shape
    return x.reshape(count, length, HEADS, -1).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Linear(WIDTH, INNER)
        self.down = Linear(INNER, WIDTH)
        self.up = Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.attention = Attention(rotation)
        self.mlp = Mlp()
        self.first_norm = Norm()
        self.second_norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first_norm(x))
        middle = x + attended
        computed = self.mlp(self.second_norm(middle))
        return middle + computed


class Transformer(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.rotation = Rotation(length, WIDTH // HEADS)
        self.layers = nn.ModuleList(Block(self.rotation) for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding[tokens, :]
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x: Tensor) -> Tensor:
    greatest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - greatest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    """The course's AdamW, which goes weight by weight and makes each moment a new tensor."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad.data
            state = self.state[parameter]
            parameter.data -= 1e-5 * parameter.data
            first = state.get("first", torch.zeros_like(gradient))
            second = state.get("second", torch.zeros_like(gradient))
            new_first = 0.9 * first + (0.1 * gradient)
            new_second = 0.999 * second + (0.001 * torch.square(gradient))
            parameter.data -= 1e-3 * new_first / (torch.sqrt(new_second) + 1e-8)
            state["first"] = new_first
            state["second"] = new_second


if __name__ == "__main__":
    main()
