"""Losses, norms and MLPs of plain PyTorch, forward and backward, as Liger-Kernel's benchmarks measure them.

Source: https://github.com/linkedin/Liger-Kernel, `benchmark/data/all_benchmark_data.csv` (rows whose metric is
"memory" and whose provider is "huggingface" or "torch") and `benchmark/scripts/`. A function runs ten times, the peak
is reset before each, and the median of the ten peaks is kept, in MiB as float32. Their own kernels' modules stand by
unused: where these hold parameters, a twin does so here. The versions of torch are not recorded.

    python liger.py cross_entropy 32768
    python liger.py head 8192               # a linear layer to 128,256 words and cross entropy, bf16
    python liger.py head_jsd 2048           # two such heads and the Jensen-Shannon divergence of their words
    python liger.py mlp 1024 8 4096 11008 gelu_pytorch_tanh full
"""

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from card import peaks
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

VOCABULARY = 128256
WIDTH = 4096


def cross_entropy(vocabulary: int) -> Callable[[], object]:
    scores = torch.randn(8 * 2048, vocabulary, requires_grad=True, device="cuda")
    target = torch.randint(vocabulary, (8 * 2048, 1), device="cuda").squeeze(1)
    criterion = nn.CrossEntropyLoss()

    def full() -> None:
        loss = criterion(scores, target)
        loss.backward()

    return full


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x)
        return self.loss(logits, target)


def head(tokens: int) -> Callable[[], object]:
    model = Head().cuda()
    twin = Head().cuda()
    x = torch.randn(tokens, WIDTH, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(VOCABULARY, (tokens, 1), device="cuda").squeeze(1)

    def full(twin: nn.Module = twin) -> None:  # the twin lives as long as this function
        loss = model(x, target)
        loss.backward()

    return full


class Divergence(nn.Module):
    """Jensen-Shannon, half and half, of logarithms of probabilities, in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.kl = nn.KLDivLoss(reduction="batchmean", log_target=True)
        self.dtype = dtype

    def forward(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        log_p = log_p.to(torch.float)
        log_q = log_q.to(torch.float)
        log_p = log_p.view(-1, log_p.size(-1))
        log_q = log_q.view(-1, log_q.size(-1))
        mean = torch.lerp(torch.exp(log_p), torch.exp(log_q), 0.5)
        # the logarithm of the mean is taken twice, as the source does
        loss = 0.5 * self.kl(torch.log(mean), log_p) + 0.5 * self.kl(torch.log(mean), log_q)
        return loss.to(self.dtype)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        settings = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
        self.student = nn.Linear(WIDTH, VOCABULARY, **settings)
        self.teacher = nn.Linear(WIDTH, VOCABULARY, **settings)
        self.divergence = Divergence(torch.bfloat16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        student_logits = self.student(x)
        teacher_logits = self.teacher(y)
        student = torch.log_softmax(student_logits / 1.0, dim=-1)
        teacher = torch.log_softmax(teacher_logits / 1.0, dim=-1)
        return self.divergence(student, teacher)


def head_jsd(tokens: int) -> Callable[[], object]:
    model = Heads()
    twin = Heads()
    share_a_weight(model.student, twin.student)
    share_a_weight(model.teacher, twin.teacher)
    x = torch.rand(tokens, WIDTH, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    y = torch.rand(tokens, WIDTH, dtype=torch.bfloat16, device="cuda")

    def full(twin: nn.Module = twin) -> None:
        loss = model(x, y)
        loss.backward()

    return full


def share_a_weight(layer: nn.Linear, other: nn.Linear) -> None:
    weight = torch.rand(VOCABULARY, WIDTH, device="cuda", dtype=torch.bfloat16)
    layer.weight.data = weight
    other.weight.data = weight


def jsd(vocabulary: int) -> Callable[[], object]:
    divergence = Divergence(torch.float)
    x = torch.randn(4 * 2048, vocabulary, requires_grad=True, device="cuda").log_softmax(dim=-1)
    target = torch.randn(4 * 2048, vocabulary, device="cuda").log_softmax(dim=-1)

    def full() -> None:
        loss = divergence(x, target)
        loss.backward(retain_graph=True)

    return full


class RmsNorm(nn.Module):
    """A root mean square norm like Llama's: normalized numbers are bf16 again, and the weights are float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)


def layer_norm(width: int) -> Callable[[], object]:
    layer = nn.LayerNorm(width, eps=1e-6)
    twin = nn.LayerNorm(width)
    return prepare_norm(layer, twin, 4096, width, torch.float32)


def rms_norm(width: int) -> Callable[[], object]:
    layer = RmsNorm(width)
    twin = RmsNorm(width)
    return prepare_norm(layer, twin, 2048, width, torch.bfloat16)


def prepare_norm(
    layer: nn.Module,
    twin: nn.Module,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Callable[[], object]:
    layer.cuda()
    twin.cuda()
    x = torch.randn(rows, width, dtype=dtype, device="cuda")
    upstream = torch.randn_like(x)
    x.requires_grad_(True)

    def full(twin: nn.Module = twin) -> None:
        y = layer(x)
        y.backward(upstream, retain_graph=True)

    return full


def mlp(
    length: int,
    batch: int,
    width: int,
    inner: int,
    activation: str,
    part: str,
) -> Callable[[], object]:
    x = torch.randn(
        (batch, length, width),
        device="cuda",
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    configuration = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        hidden_act=activation,
    )
    layer = LlamaMLP(config=configuration).cuda().to(torch.bfloat16)

    def full() -> None:
        y = layer(x)
        y.backward(torch.randn_like(y), retain_graph=True)

    full()  # the source's process has gone backward by now: autograd's thread has its own workspace of cuBLAS
    layer.zero_grad()
    x.grad = None
    if part == "forward":
        return lambda: layer(x)
    if part == "backward":
        upstream = torch.randn_like(x)
        y = layer(x)
        return lambda: y.backward(upstream, retain_graph=True)
    return full


CASES: dict[str, Callable[..., Callable[[], object]]] = {
    "cross_entropy": cross_entropy,
    "head": head,
    "head_jsd": head_jsd,
    "jsd": jsd,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "mlp": mlp,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("sizes", nargs="+", help="numbers, and for mlp the activation and the part")
    arguments = parser.parse_args()
    sizes = [int(size) if size.isdigit() else size for size in arguments.sizes]
    run = CASES[arguments.case](*sizes)
    measured = []
    for _ in range(10):
        torch.cuda.reset_peak_memory_stats()
        run()
        measured.append(peaks())
    medians = {}
    for figure in ("allocated", "reserved"):
        medians[figure] = int(statistics.median(run_peaks[figure] for run_peaks in measured))
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
