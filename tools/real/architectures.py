"""Two training steps of two layers of many architectures, in four ways, and of whole models: `h100/architectures.csv`.

    python architectures.py found.json

Weights are new and made on the device; 4 × 512 tokens; AdamW, fused. Peaks after the forward pass, the backward pass
and the update: (allocated, reserved), in bytes.
"""

import json
import sys
from typing import Any, NamedTuple

import torch
from card import empty_caches
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

MODES = ("fp32", "autocast", "bf16", "ckpt")
ENCODERS = ("bert", "roberta", "distilbert")
SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
TWO_GROUPS = {"num_key_value_heads": 2}
GPT = {"n_embd": 512, "n_layer": 2, "n_head": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
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


class Training(NamedTuple):
    architecture: str
    mode: str
    dtype: torch.dtype
    shape: tuple[int, int]  # rows, tokens
    config: dict[str, Any]


WHOLE = {
    "llama-3.2-1b ckpt bf16 4x2048": Training(
        architecture="llama",
        mode="ckpt",
        dtype=torch.bfloat16,
        shape=(4, 2048),
        config={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b bf16 4x1024": Training(
        architecture="qwen3",
        mode="bf16",
        dtype=torch.bfloat16,
        shape=(4, 1024),
        config={
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-1.5b autocast 2x1024": Training(
        architecture="qwen2",
        mode="autocast",
        dtype=torch.float32,
        shape=(2, 1024),
        config={
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b ckpt bf16 1x2048": Training(
        architecture="llama",
        mode="ckpt",
        dtype=torch.bfloat16,
        shape=(1, 2048),
        config={
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}


def main() -> None:
    results = {}
    for name, training in trainings().items():
        empty_caches()
        results[name] = train(training)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(results, file, indent=0)


def trainings() -> dict[str, Training]:
    """Return the small models in all modes, then the whole ones, by their names."""
    small = {}
    for architecture, config in ARCHITECTURES.items():
        for mode in MODES:
            dtype = torch.bfloat16 if mode == "bf16" else torch.float32
            training = Training(architecture, mode, dtype, (4, 512), SMALL | config)
            small[f"{architecture} {mode}"] = training
    return small | WHOLE


def train(training: Training) -> list[list[tuple[int, int]]]:
    """Return the peaks of each step: after its forward pass, its backward pass and its update."""
    model = new_model(training)
    token_ids = torch.randint(1, 30000, training.shape, device="cuda")
    model.config.use_cache = False
    model.train()
    if training.mode == "ckpt":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    steps = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=training.mode == "autocast"):
            loss = model(input_ids=token_ids, labels=token_ids).loss
        forward = peaks()
        loss.backward()
        backward = peaks()
        optimizer.step()
        optimizer.zero_grad()
        steps.append([forward, backward, peaks()])
    return steps


def new_model(training: Training) -> Any:
    auto = AutoModelForMaskedLM if training.architecture in ENCODERS else AutoModelForCausalLM
    with torch.device("cuda"):
        config = AutoConfig.for_model(training.architecture, **training.config)
        return auto.from_config(config, dtype=training.dtype)


def peaks() -> tuple[int, int]:
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


if __name__ == "__main__":
    main()
