"""Sample texts of a model."""

from typing import Any

from workbench.models.load import quiet


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Continue a prompt by `tokens` tokens, and return the whole text.

    Each token is drawn from the 50 likeliest at temperature 0.8, under a fixed seed. `check_sample` has made sure,
    before anything was loaded, that the model has positions for prompt and continuation.
    """
    import torch

    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    was_training = model.training
    with quiet(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model.eval()
        out = model.generate(
            **inputs,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
            use_cache=True,
        )
    model.train(was_training)
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
