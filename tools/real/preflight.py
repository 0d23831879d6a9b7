"""The calibration runs of highwaterlabs/torch-preflight on a Tesla T4, one after the other up to the one asked for.

Source: https://github.com/highwaterlabs/torch-preflight, `tests/calibration/measure_cuda.py` (what is run) and
`tests/calibration/measured_peaks.json` (what was measured: torch 2.11.0+cu128, Colab or Kaggle T4).

All of its runs share a process, and so the workspaces of cuBLAS and whatever else stays allocated between two of them:
a small multiplication and a convolution first, five hand-written transformers, then GPT-2 with its loss, and
DistilBERT and BERT without a head and with the mean of the squared hidden state for a loss. Each is trained for two
steps under autocast with AdamW, and the second is measured. The cache is emptied before and after each run.
`--alone` leaves the others out. The source loads weights; here they come from the configuration.

    python preflight.py gpt2 4 128
"""

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator

import torch
from card import peaks
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2LMHeadModel,
)

STACKS = [  # layers, width, heads, inner width, batch, length, dropout, fused attention
    (4, 512, 8, 2048, 4, 256, 0.0, False),
    (6, 768, 12, 3072, 8, 512, 0.1, False),
    (6, 768, 12, 3072, 4, 1024, 0.0, True),
    (12, 768, 12, 3072, 2, 512, 0.0, False),
    (4, 1024, 16, 4096, 2, 1024, 0.0, True),
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config()),
    "distilbert": lambda: DistilBertModel(DistilBertConfig()),
    "bert": lambda: BertModel(BertConfig()),
}
SHAPES = [(4, 128), (8, 256)]
Run = tuple[str, int, int]  # the model's name, the batch, the length


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("length", type=int)
    parser.add_argument("--alone", action="store_true", help="without the runs before it")
    arguments = parser.parse_args()
    wanted = (arguments.model, arguments.batch, arguments.length)
    if not arguments.alone:
        first_touches()
        for sizes in STACKS:
            with empty_cache():
                stack(*sizes)
        for run in runs_before(wanted):
            with empty_cache():
                model_run(*run)
    with empty_cache():
        print(json.dumps(model_run(*wanted)))


def runs_before(wanted: Run) -> list[Run]:
    runs = [(name, batch, length) for name in MODELS for batch, length in SHAPES]
    if wanted not in runs:
        return runs
    return runs[: runs.index(wanted)]


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def first_touches() -> None:
    """Do what the source does to see how large the CUDA context is."""
    matrix = torch.randn(256, 256, device="cuda")
    (matrix @ matrix).sum().item()
    convolution = nn.Conv2d(3, 16, 3, padding=1).cuda()
    convolution(torch.randn(1, 3, 64, 64, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    del matrix, convolution
    torch.cuda.empty_cache()


def stack(
    layers: int,
    width: int,
    heads: int,
    inner: int,
    batch: int,
    length: int,
    dropout: float,
    fused: bool,
) -> dict[str, int]:
    stacked = [Layer(width, heads, inner, dropout) for _ in range(layers)]
    model = nn.ModuleList(stacked).cuda()
    x = torch.randn(batch, length, width, device="cuda")

    def loss_of() -> tuple:
        y = x
        for layer in model:
            y = layer(y, fused)
        return y.float().pow(2).mean(), None

    return second_step(model, 1e-4, loss_of)


def model_run(name: str, batch: int, length: int) -> dict[str, int]:
    model = MODELS[name]().cuda()
    model.train()
    ids = torch.randint(0, model.config.vocab_size - 1, (batch, length), device="cuda")

    def loss_of() -> tuple:
        if name == "gpt2":
            output = model(input_ids=ids, labels=ids)
            return output.loss, output
        output = model(input_ids=ids)
        return output.last_hidden_state.float().pow(2).mean(), output

    return second_step(model, 1e-5, loss_of)


def second_step(
    model: nn.Module,
    rate: float,
    loss_of: Callable[[], tuple],
) -> dict[str, int]:
    """Return the peaks of the second step.

    `loss_of` gives the loss and whatever else the source keeps until the optimizer has stepped (logits, caches).
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss, kept = loss_of()
        loss.backward()
        optimizer.step()
        del loss, kept
    torch.cuda.synchronize()
    return peaks()


class Layer(nn.Module):
    """A transformer layer that normalizes first; only with dropout do its linear layers have biases."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        biases = dropout > 0
        self.norm_1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=biases)
        self.key = nn.Linear(width, width, bias=biases)
        self.value = nn.Linear(width, width, bias=biases)
        self.out = nn.Linear(width, width, bias=biases)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=biases)
        self.down = nn.Linear(inner, width, bias=biases)
        self.drop = nn.Dropout(dropout) if biases else nn.Identity()

    def forward(self, x: Tensor, fused: bool) -> Tensor:
        batch, length, width = x.shape
        y = self.norm_1(x)
        shape = (batch, length, self.heads, width // self.heads)
        q = self.query(y).view(shape).transpose(1, 2)
        k = self.key(y).view(shape).transpose(1, 2)
        v = self.value(y).view(shape).transpose(1, 2)
        # in one line what nobody holds is free at once: names for it would hold it until the end
        if fused:
            attended = functional.scaled_dot_product_attention(q, k, v)
        else:
            attended = self.drop(((q @ k.transpose(-2, -1)) / shape[-1] ** 0.5).softmax(-1)) @ v
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm_2(x)))))


if __name__ == "__main__":
    main()
