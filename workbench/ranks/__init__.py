"""One training on several ranks: processes that share a batch, and with FSDP2 also the model."""

import os

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each process


def launched() -> bool:
    """Whether torchrun or `accelerate launch` has started this process as one of several ranks."""
    return all(name in os.environ for name in LAUNCHERS)
