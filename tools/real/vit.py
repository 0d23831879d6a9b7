"""A vision transformer (ViT-L/16) trained on pictures of 224 x 224, step by step of an article on memory.

Source: https://github.com/rasbt/pytorch-memory-optim, scripts 01 to 06, and logs.md for the reserved memory of each
(`max_memory_reserved()` after an epoch, in GB with two places). torchvision's model, Lightning Fabric's precisions and
CIFAR-10 stand here in our own words: random weights, pictures of noise, three steps and a batch without gradients.

01 fp32, 64 pictures;   02 fp16 autocast;   03 bf16 throughout;   04 that with 16 pictures;   05 four at a time,
accumulated over four;   06 that with SGD.

    python vit.py 03
"""

import json
import sys

import torch
from card import peaks
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1024
LAYERS = 24
HEADS = 16
PATCH = 16
SIDE = 224
PATCHES = (SIDE // PATCH) ** 2
CLASSES = 10
PICTURES = {"01": 64, "02": 64, "03": 64, "04": 16, "05": 4, "06": 4}
ACCUMULATED = 4


def main() -> None:
    stage = sys.argv[1]
    count = PICTURES[stage]
    if stage != "01":
        torch.set_float32_matmul_precision("high")
    model = Vit().cuda()
    accumulates = ACCUMULATED if stage in ("05", "06") else 1
    scaler = torch.amp.GradScaler("cuda", enabled=stage == "02")
    is_half = stage >= "03"  # stages are called as the source calls its scripts
    if is_half:
        model.to(torch.bfloat16)
    if stage == "06":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)

    def answer(pictures: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=stage == "02"):
            logits = model(pictures.bfloat16() if is_half else pictures)
        return logits.float()

    model.train()
    for step in range(3 * accumulates):
        pictures, labels = batch(count)
        logits = answer(pictures)
        loss = functional.cross_entropy(logits, labels) / accumulates
        if accumulates == 1:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        if accumulates == 1:
            scaler.step(optimizer)
            scaler.update()
        elif step % accumulates == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        pictures, labels = batch(count)
        logits = answer(pictures)
    print(json.dumps(peaks()))


def batch(count: int) -> tuple[Tensor, Tensor]:
    pictures = torch.zeros(count, 3, SIDE, SIDE).cuda()
    labels = torch.zeros(count, dtype=torch.int64).cuda()
    return pictures, labels


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.second_norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        normal = self.first_norm(x)
        mixed, _ = self.attention(normal, normal, normal, need_weights=False)
        x = mixed + x
        return x + self.mlp(self.second_norm(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.picture = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, PATCHES + 1, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        count = pictures.shape[0]
        x = self.patches(pictures)
        x = x.reshape(count, WIDTH, -1).permute(0, 2, 1)
        x = torch.cat([self.picture.expand(count, -1, -1), x], dim=1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


if __name__ == "__main__":
    main()
