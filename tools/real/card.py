"""The card, as the scripts of this folder use it: its peaks, a snapshot's layout, and caches that are emptied."""

import gc
import json

import torch
from layout import layout


def empty_caches() -> None:
    """Empty the caches, so that a measurement knows nothing of those before it."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def peaks() -> dict[str, int]:
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def print_layout() -> None:
    snapshot = torch.cuda.memory._snapshot()
    print(json.dumps(layout(snapshot)))
