"""GPT-2 124M trained from scratch on an A100, step by step of an article on training speed.

Source: https://github.com/rasbt/LLMs-from-scratch, `ch05/10_llm-training-speed/` (00_orig.py, 01_opt_single_gpu.py,
and its README for the reserved memory after each change; torch 2.6.0+cu124, "A100 GPUs").

The stages add up, as there:
0 everything by hand, the causal mask a buffer;   1 the mask made in every forward pass;   2 tensor cores (TF32);
3 fused AdamW;   4 pinned memory;   5 bfloat16 throughout;   6 PyTorch's LayerNorm and GELU;   7 fused attention.
Stages 8 to 10 (`torch.compile`, a padded vocabulary, a larger batch) are left out: they need a compiler.
Only files for stage 0 and the last exist; what lies between follows the README's words.

An epoch is 52 steps of 8 x 1024 tokens with an evaluation of one batch of either kind at every 15th, and then 50
tokens written from a prompt of four, with the forward pass of the whole model for each. The source prints
`memory_reserved()`, which is the highest too, since nothing empties the cache. Its book is replaced by random tokens.
It also prints `memory_allocated()` at the end, which "left" repeats.

    python raschka_gpt.py 0
"""

import argparse
import json

import torch
from card import peaks
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 50257
CONTEXT = 1024
WIDTH = 768
HEADS = 12
LAYERS = 12
DROPOUT = 0.1
BATCH = 8
STEPS = 52
EVALUATE_EVERY = 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", type=int, choices=range(8))
    parser.add_argument("--epochs", type=int, default=1)
    arguments = parser.parse_args()
    stage = arguments.stage
    torch.manual_seed(123)
    if stage >= 2:
        torch.set_float32_matmul_precision("high")
    model = Gpt(stage).cuda()
    if stage >= 5:
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=5e-4,
        weight_decay=0.1,
        fused=True if stage >= 3 else None,
    )
    step = 0
    for _ in range(arguments.epochs):
        model.train()
        for _ in range(STEPS):
            inputs, targets = batch()
            if stage >= 4:
                inputs = inputs.pin_memory()
                targets = targets.pin_memory()
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            if step % EVALUATE_EVERY == 0:
                evaluate(model)
            step += 1
        write(model)
    print(json.dumps(peaks() | {"left": torch.cuda.memory_allocated()}))


def batch() -> tuple[Tensor, Tensor]:
    chunk = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    return chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    inputs = inputs.cuda()
    targets = targets.cuda()
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()
    for _ in range(2):  # a batch to train on, a batch held back
        total = 0.0
        loss = loss_of(model, *batch())
        total += loss.item()
    model.train()


@torch.no_grad()
def write(model: nn.Module) -> None:
    model.eval()
    ids = torch.randint(VOCABULARY, (1, 4)).cuda()
    for _ in range(50):
        logits = model(ids[:, -CONTEXT:])
        logits = logits[:, -1, :]
        ids = torch.cat((ids, torch.argmax(logits, dim=-1, keepdim=True)), dim=1)
    model.train()


class HandNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normal = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normal + self.shift


class HandGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.tensor(2.0 / torch.pi))
        return 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * torch.pow(x, 3))))


class HandAttention(nn.Module):
    def __init__(self, mask_kept: bool) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.mask_kept = mask_kept
        if mask_kept:
            self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape = (batch, length, HEADS, WIDTH // HEADS)
        keys = self.key(x)
        queries = self.query(x)
        values = self.value(x)
        keys = keys.view(shape).transpose(1, 2)
        queries = queries.view(shape).transpose(1, 2)
        values = values.view(shape).transpose(1, 2)
        scores = queries @ keys.transpose(2, 3)
        if self.mask_kept:
            mask = self.mask.bool()[:length, :length]
        else:
            mask = torch.triu(
                torch.ones(length, length, dtype=torch.bool, device=x.device),
                diagonal=1,
            )
        scores.masked_fill_(mask, -torch.inf)
        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)
        weights = self.dropout(weights)
        context = (weights @ values).transpose(1, 2)
        context = context.reshape(batch, length, WIDTH)
        return self.out(context)


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        qkv = qkv.view(batch, length, 3, HEADS, WIDTH // HEADS)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        queries, keys, values = qkv
        dropout = DROPOUT if self.training else 0.0
        context = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=dropout,
            is_causal=True,
        )
        context = context.transpose(1, 2).contiguous().view(batch, length, WIDTH)
        return self.out(context)


class Block(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.attention = FusedAttention() if stage >= 7 else HandAttention(mask_kept=stage == 0)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh") if stage >= 6 else HandGelu(),
            nn.Linear(4 * WIDTH, WIDTH),
        )
        self.norm_1 = norm(stage)
        self.norm_2 = norm(stage)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm_1(x)
        x = self.attention(x)
        x = self.drop(x)
        x = x + shortcut
        shortcut = x
        x = self.norm_2(x)
        x = self.feed_forward(x)
        x = self.drop(x)
        return x + shortcut


def norm(stage: int) -> nn.Module:
    return nn.LayerNorm(WIDTH) if stage >= 6 else HandNorm()


class Gpt(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block(stage) for _ in range(LAYERS)])
        self.norm = norm(stage)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.tokens(ids)
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = tokens + positions
        x = self.drop(x)
        x = self.blocks(x)
        x = self.norm(x)
        return self.head(x)


if __name__ == "__main__":
    main()
