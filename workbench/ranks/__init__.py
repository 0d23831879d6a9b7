"""One training on several ranks: processes that share a batch, and with FSDP2 also the model."""

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what PyTorch and accelerate ask for
