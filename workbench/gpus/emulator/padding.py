"""Telling the card whether batches hold padding: it computes no mask, and cannot answer for itself."""

import os
from collections.abc import Mapping
from itertools import islice
from typing import Any


def announce_padding(data: Mapping[str, Any], size: int, padding: bool = False) -> bool:
    """Whether there is `padding`, or the first `size` examples make a batch that has some; noted for the stubs.

    Args:
        data: `train_dataset` and `data_collator`, as the Trainer takes them.
    """
    mask = data["data_collator"](list(islice(data["train_dataset"], size))).get("attention_mask")
    padded = padding or (mask is not None and bool((mask == 0).any()))
    os.environ["EMULATED_PADDING"] = "1" if padded else ""
    return padded
