"""Three products of one linear layer, with and without gradients: the smallest of memory snapshots.

Source: https://github.com/shreyansh26/MLSys-Experiments, `model_memory_usage`: `profile_grad.py` and
`profile_no_grad.py`, after https://huggingface.co/blog/train_memory, and the snapshots that they wrote.

    python linear.py grad
"""

import sys

import torch
from card import print_layout
from torch import nn


def main() -> None:
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    layer = nn.Linear(10_000, 50_000, device="cuda")
    with torch.set_grad_enabled(sys.argv[1] == "grad"):
        for _ in range(3):
            inputs = torch.randn(5_000, 10_000, device="cuda")
            outputs = layer(inputs)
    print_layout()
    del outputs  # the snapshot has them


if __name__ == "__main__":
    main()
