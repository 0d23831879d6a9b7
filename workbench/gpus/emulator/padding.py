"""Telling the card whether batches hold padding: it computes no mask, and cannot answer for itself."""

import os
from itertools import islice
from typing import Any

from workbench.base.patches import changed_environment

VARIABLE = "EMULATED_PADDING"


def announce_padding(trainer: Any, padding: bool = False) -> bool:
    """Whether there is `padding`, or the first rows of a Trainer's data make a batch that has some; the stubs are told.

    Not while the Trainer evaluates: blocks that are held out have none, whatever is trained on.
    """
    rows = list(islice(trainer.train_dataset, trainer.args.per_device_train_batch_size))
    mask = trainer.data_collator(rows).get("attention_mask")
    padded = padding or (mask is not None and bool((mask == 0).any()))
    os.environ[VARIABLE] = "1" if padded else ""
    trainer.evaluate = changed_environment({VARIABLE: ""})(trainer.evaluate)
    return padded
