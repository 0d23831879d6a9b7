"""Sample texts of a model."""

from typing import Any

from workbench.errors import ConfigurationError
from workbench.models.family import positions
from workbench.models.load import quiet


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Continue a prompt, sampled at temperature 0.8 from the 50 likeliest tokens under a fixed seed."""
    import torch

    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    prompt_tokens, available = inputs["input_ids"].shape[1], positions(model.config)
    if adapter := getattr(model, "active_peft_config", None):
        prompt_tokens += getattr(adapter, "num_virtual_tokens", None) or 0
    if prompt_tokens + tokens > available:
        raise ConfigurationError(
            f"generate: {prompt_tokens} + {tokens} tokens are beyond the model's {available} positions."
        )
    training = model.training
    with quiet(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model.eval()
        out = model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=0.8, top_k=50,
            pad_token_id=tokenizer.eos_token_id, use_cache=True,
        )  # fmt: skip
    model.train(training)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
