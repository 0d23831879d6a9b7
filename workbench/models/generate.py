"""Sample texts of a model."""

from typing import Any

from workbench.models.load import quiet


def generate(model: Any, tokenizer: Any, prompt: str, tokens: int) -> str:
    """Continue a prompt, sampled at temperature 0.8 from the 50 likeliest tokens under a fixed seed.

    That the model has positions for prompt and continuation is asked before anything is loaded (`check_sample`).
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
