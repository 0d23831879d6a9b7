"""Another student's transformer of the course CS336: a memory snapshot after 48 steps of training, on an RTX 4090.

Source: https://github.com/notHanmin/assignment2-systems at 33be88e: `cs336_systems/benchmarking_script.py` (what is
run), `cs336_systems/adapters.py` (the model and AdamW, written by hand) and `memory_snapshot.pickle`. The large model
(36 layers of 1,280) with 4 rows of 256 tokens goes forward, and backward from the sum of its logits; ten steps with
AdamW come after 0, 1, 2 and 5 steps without, all in one process, and the last step is recorded.

    python cs336_large.py
"""

import math
from collections.abc import Iterable

import torch
from card import print_layout
from torch import Tensor, nn

VOCABULARY = 10_000
WIDTH = 1280
LAYERS = 36
HEADS = 20
INNER = 5120
ROWS = 4
LENGTH = 256
WARM_UPS = (0, 1, 2, 5)
STEPS = 10


def main() -> None:
    model = Transformer()
    optimizer = AdamW(model.parameters())
    for warm_up_steps in WARM_UPS:
        run(model, optimizer, warm_up_steps)


def run(model: "Transformer", optimizer: "AdamW", warm_up_steps: int) -> None:
    model.to("cuda")
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), device="cuda")
    for step in range(warm_up_steps + STEPS):
        is_last = step == warm_up_steps + STEPS - 1 and warm_up_steps == WARM_UPS[-1]
        if is_last:
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)
        logits = model(tokens)
        loss = logits.sum()
        optimizer.zero_grad()
        loss.backward()
        if step >= warm_up_steps:
            optimizer.step()
    if is_last:
        print_layout()


def weight(outputs: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(outputs, inputs) * 0.02)


def project(weights: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("oi,...i->...o", weights, x)


class Linear(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.weight, x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = (x**2).mean(-1, keepdim=True)
        root = torch.sqrt(mean_square + 1e-5)
        return (x / root) * self.weight


class Rotation(nn.Module):
    """A rotation that is made anew in every layer and every step, as the source does."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        steps = torch.arange(0, width, 2, device="cuda", dtype=torch.float32)
        exponents = steps / width
        frequencies = 1.0 / (10_000**exponents)
        places = torch.arange(length, device="cuda", dtype=torch.float32)
        angles = torch.einsum("p,f->pf", places, frequencies)
        cos = torch.cos(angles)
        sin = torch.sin(angles)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        cos = self.cos[places]
        sin = self.sin[places]
        first = x[..., 0::2]
        second = x[..., 1::2]
        cos = cos[:, None]
        sin = sin[:, None]
        turned_first = first * cos - second * sin
        turned_second = first * sin + second * cos
        turned = torch.empty_like(x)
        turned[..., 0::2] = turned_first
        turned[..., 1::2] = turned_second
        return turned


def softmax(x: Tensor) -> Tensor:
    greatest = torch.max(x, dim=-1, keepdim=True).values
    shifted = x - greatest
    powers = torch.exp(shifted)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    masked = torch.where(mask, scores, -torch.inf)
    shares = softmax(masked / math.sqrt(query.shape[-1]))
    return torch.einsum("...qk,...kd->...qd", shares, value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = weight(WIDTH, WIDTH)
        self.key = weight(WIDTH, WIDTH)
        self.value = weight(WIDTH, WIDTH)
        self.out = weight(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # the order in which operations are written is the order in which autograd goes back, and asks for memory
        queries = project(self.query, x)
        keys = project(self.key, x)
        values = project(self.value, x)
        query = in_heads(queries)
        key = in_heads(keys)
        value = in_heads(values)
        places = torch.arange(LENGTH, device=x.device)
        places = places.expand(ROWS, LENGTH)
        rotation = Rotation(LENGTH, WIDTH // HEADS)
        turned_query = rotation(query, places)
        turned_key = rotation(key, places)
        mask = torch.tril(
            torch.ones((LENGTH, LENGTH), device=x.device, dtype=torch.bool),
        )
        attended = attend(turned_query, turned_key, value, mask)
        joined = attended.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)
        mixed = project(self.out, joined)
        return mixed  # noqa: RET504 - in one line, what is local here would be freed in another order


def in_heads(x: Tensor) -> Tensor:
    return x.reshape(ROWS, LENGTH, HEADS, -1).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = weight(INNER, WIDTH)
        self.down = weight(WIDTH, INNER)
        self.up = weight(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = project(self.gate, x)
        up = project(self.up, x)
        silu = gate * torch.sigmoid(gate)
        product = silu * up
        return project(self.down, product)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = Norm()
        self.attention = Attention()
        self.second_norm = Norm()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        x = x + self.mlp(self.second_norm(x))
        return x  # noqa: RET504


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Linear(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.head = Linear(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding.weight[tokens]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.head(x)
        return logits  # noqa: RET504


class AdamW(torch.optim.Optimizer):
    """The student's AdamW, which goes weight by weight, in place."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["first"] = torch.zeros_like(parameter)
                state["second"] = torch.zeros_like(parameter)
            gradient = parameter.grad.data
            state["first"].mul_(0.9).add_(gradient, alpha=0.1)
            state["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            divisor = (state["second"].sqrt()).add_(1e-8)
            parameter.data.addcdiv_(state["first"], divisor, value=-1e-3)
            parameter.data.add_(parameter.data, alpha=-1e-5)


if __name__ == "__main__":
    main()
