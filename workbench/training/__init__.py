"""One fine-tuning run: its checks, its execution, the Trainer, and the world it runs in."""
