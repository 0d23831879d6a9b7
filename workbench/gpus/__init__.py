"""GPUs without a GPU: what is known of each card, and a model of the allocator that PyTorch has there."""
