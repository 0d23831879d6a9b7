"""GPT-2: its facts, the sizes it was published in, its tokenizer, and its customary learning rate."""

from functools import cache
from typing import Any

from workbench.errors import ConfigurationError
from workbench.models.family import ModelFamily
from workbench.paths import MODELS

COUNT = (1, 10_000_000)
MLP = {"c_fc", "c_proj"}  # of whose matrices one side is not C; attention has a `c_proj` too

GPT2 = ModelFamily(
    model_type="gpt2", title="GPT-2", config_class="GPT2Config", model_class="GPT2LMHeadModel",
    dropout_fields=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    ranges={
        "n_layer": (1, 1000), "n_head": COUNT, "n_embd": COUNT, "n_positions": COUNT, "vocab_size": COUNT,
        "embd_pdrop": (0, 1), "attn_pdrop": (0, 1), "resid_pdrop": (0, 1), "layer_norm_epsilon": (1e-12, 1),
        "initializer_range": (0, 10),
    },
    shortest_side=lambda c, of: min(c.n_embd, c.n_inner or c.n_embd if {*of} & MLP else c.n_embd),
    # `gelu_new`, the default, is written out in Python; this is the same formula as one kernel of PyTorch's
    fused_activation={"activation_function": "gelu_pytorch_tanh"},
    matrices=("c_attn", "c_fc", "c_proj"),
    matrices_are_transposed=True,  # transformers' `Conv1D`
    scaled_outputs=("c_attn",),  # queries, keys and values, computed in one matrix
    scaled_inputs=("mlp.c_proj",),
)  # fmt: skip

# Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); 12 heads of 64 in the smallest
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}


def learning_rate(config: Any) -> float:
    """The customary rate of full fine-tuning: the Trainer's default, and for models narrower than GPT-2 the rate that
    was best for the embedded one (of 0.0005, 0.001 and 0.002, after 30 steps on Shakespeare)."""
    return 5e-5 if config.n_embd >= SIZES["gpt2"]["n_embd"] else 1e-3


@cache
def gpt2_tokenizer() -> Any:
    """GPT-2's 50,257-token byte-level BPE, rebuilt from its merges: 256 bytes, then one token per merge, then the end.

    Source of the merges and of the order of the bytes: `data/models/gpt2/SOURCE.md`.
    """
    from tokenizers import pre_tokenizers
    from transformers import GPT2Tokenizer

    lines = (MODELS / "gpt2" / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [(left, right) for left, right in (line.split(" ") for line in lines if not line.startswith("#version"))]
    # the alphabet in the order of GPT-2's `bytes_to_unicode`: printable bytes first, then the others as U+0100…
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges), "<|endoftext|>"]
    if len(tokens) != 50257:
        raise ConfigurationError(f"GPT-2 has 50,257 tokens, and data/models/gpt2/merges.txt {len(tokens)}: restore it.")
    return GPT2Tokenizer({token: i for i, token in enumerate(tokens)}, merges, model_max_length=1024)  # type: ignore[arg-type]
