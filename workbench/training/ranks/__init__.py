"""One training on several ranks: processes that share a batch, and with FSDP2 also the model."""
