"""GPT-2's tokenizer, and the customary learning rate."""

from functools import cache
from typing import Any

from workbench.base.paths import MODELS

NARROW = 768  # the width of the smallest GPT-2
GPT2_TOKENS = 50257


def learning_rate(config: Any) -> float:
    """The customary rate of full fine-tuning: the Trainer's default, and a larger one for models narrower than GPT-2.

    The larger one was the best for the embedded model, of 0.0005, 0.001 and 0.002, after 30 steps on Shakespeare.
    """
    return 5e-5 if config.get_text_config().hidden_size >= NARROW else 1e-3


@cache
def gpt2_tokenizer() -> Any:
    """GPT-2's 50,257-token byte-level BPE, rebuilt from its merges: 256 bytes, then one token per merge, then the end.

    Source of the merges and of the order of the bytes: `data/models/gpt2/SOURCE.md`.
    """
    from tokenizers import pre_tokenizers
    from transformers import GPT2Tokenizer

    lines = (MODELS / "gpt2" / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [tuple(line.split(" ")) for line in lines[1:]]  # the first line has a version
    # the alphabet in the order of GPT-2's `bytes_to_unicode`: printable bytes first, then the others as U+0100…
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *map("".join, merges), "<|endoftext|>"]
    ids = {token: index for index, token in enumerate(tokens)}
    return GPT2Tokenizer(ids, merges, model_max_length=1024)  # type: ignore[arg-type]
