"""GPT-2's tokenizer, and the customary learning rate."""

from functools import cache
from typing import Any

from workbench.base.paths import MODELS

GPT2_WIDTH = 768  # C of the smallest GPT-2
GPT2_TOKENS = 50257  # V of GPT-2


def learning_rate(config: Any) -> float:
    """Return the customary rate of full fine-tuning: the Trainer's default, or 0.001 for models narrower than GPT-2.

    Of 0.0005, 0.001 and 0.002, the middle one was the best for the embedded model, after 30 steps on Shakespeare.
    """
    return 5e-5 if config.get_text_config().hidden_size >= GPT2_WIDTH else 1e-3


@cache
def gpt2_tokenizer() -> Any:
    """Build GPT-2's byte-level BPE of 50,257 tokens from its merges: 256 bytes, then one token a merge, then the end.

    The source of the merges and of the order of the bytes: `data/models/gpt2/SOURCE.md`.
    """
    from tokenizers import pre_tokenizers
    from transformers import GPT2Tokenizer

    lines = (MODELS / "gpt2" / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines[1:]]  # the first line is a version
    # Sorting gives the order of GPT-2's `bytes_to_unicode`: printable bytes first, then the others as U+0100 and on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *map("".join, merges), "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(tokens)}
    return GPT2Tokenizer(ids, merges, model_max_length=1024)  # type: ignore[arg-type]
