"""Two training steps of two layers of many architectures, in four ways, and of whole models: `h100/architectures.csv`.

    python architectures.py found.json

Weights are new and made on the device; 4 × 512 tokens; AdamW, fused. Peaks after the forward pass, the backward pass
and the update: (allocated, reserved), in bytes.
"""

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
TWO_GROUPS, GPT = {"num_key_value_heads": 2}, {"n_embd": 512, "n_layer": 2, "n_head": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": TWO_GROUPS,
    "qwen2": TWO_GROUPS,
    "qwen3": {**TWO_GROUPS, "head_dim": 64},
    "mistral": {**TWO_GROUPS, "sliding_window": 256},
    "gemma": {"num_key_value_heads": 1, "head_dim": 64},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 64},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 64},
    "phi": {},
    "phi3": {"num_key_value_heads": 8},
    "opt": {"ffn_dim": 2048, "word_embed_proj_dim": 512},
    "gpt_neox": {},
    "gptj": {**GPT, "rotary_dim": 32},
    "gpt2": GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 8, "attention_types": [[["global", "local"], 1]]},
    "bloom": {"n_layer": 2, "n_head": 8},
    "falcon": {},
    "mpt": {"d_model": 512, "n_layers": 2, "n_heads": 8},
    "stablelm": {"num_key_value_heads": 8},
    "olmo": {},
    "olmo2": {},
    "granite": TWO_GROUPS,
    "cohere": TWO_GROUPS,
    "smollm3": TWO_GROUPS,
    "starcoder2": TWO_GROUPS,
    "bert": {},
    "roberta": {},
    "distilbert": {"dim": 512, "hidden_dim": 2048, "n_layers": 2, "n_heads": 8},
    "mixtral": {**TWO_GROUPS, "num_local_experts": 4},
    "mamba": {},
}
ENCODERS = ("bert", "roberta", "distilbert")
LLAMA = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
WHOLE: dict[str, tuple[str, str, torch.dtype, tuple[int, int], dict[str, Any]]] = {
    "llama-3.2-1b ckpt bf16 4x2048": (
        "llama", "ckpt", torch.bfloat16, (4, 2048),
        {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
         "tie_word_embeddings": True},
    ),
    "qwen3-0.6b bf16 4x1024": (
        "qwen3", "bf16", torch.bfloat16, (4, 1024),
        {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "qwen2.5-1.5b autocast 2x1024": (
        "qwen2", "autocast", torch.float32, (2, 1024),
        {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
         "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama-3.1-8b ckpt bf16 1x2048": (
        "llama", "ckpt", torch.bfloat16, (1, 2048),
        {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    ),
}  # fmt: skip


def peaks() -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def trained(model: torch.nn.Module, words: torch.Tensor, mode: str) -> list[list[tuple[int, int]]]:
    model.config.use_cache = False
    model.train()
    if mode == "ckpt":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=mode == "autocast"):
            loss = model(input_ids=words, labels=words).loss
        forward = peaks()
        loss.backward()
        backward = peaks()
        optimizer.step()
        optimizer.zero_grad()
        steps.append([forward, backward, peaks()])
    return steps


def of_config(kind: str, mode: str, dtype: torch.dtype, shape: tuple[int, int], config: dict[str, Any]) -> Any:
    auto = AutoModelForMaskedLM if kind in ENCODERS else AutoModelForCausalLM
    with torch.device("cuda"):
        model = auto.from_config(AutoConfig.for_model(kind, **config), dtype=dtype)
    return trained(model, torch.randint(1, 30000, shape, device="cuda"), mode)


def afresh(run: Callable[..., Any], *arguments: Any) -> Any:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return run(*arguments)


if __name__ == "__main__":
    found = {}
    for kind, more in KINDS.items():
        for mode in ("fp32", "autocast", "bf16", "ckpt"):
            dtype = torch.bfloat16 if mode == "bf16" else torch.float32
            found[f"{kind} {mode}"] = afresh(of_config, kind, mode, dtype, (4, 512), {**SMALL, **more})
    for name, arguments in WHOLE.items():
        found[name] = afresh(of_config, *arguments)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(found, file, indent=0)
