"""The answer of the emulated GPU to the question whether batches hold padding: it computes no mask to tell it by."""

import os
from itertools import islice
from typing import Any

from workbench.base.patches import change_environment

VARIABLE = "EMULATED_PADDING"


def announce_padding(trainer: Any, padding: bool = False) -> bool:
    """Tell the stubs whether batches hold padding, and return it: there is `padding`, or the first rows of a Trainer's
    data make a batch that has some.

    While the Trainer evaluates, the stubs answer that there is none: blocks that are held out have no padding, whatever
    is trained on.
    """
    rows = list(islice(trainer.train_dataset, trainer.args.per_device_train_batch_size))
    mask = trainer.data_collator(rows).get("attention_mask")
    has_padding = padding or (mask is not None and bool((mask == 0).any()))
    os.environ[VARIABLE] = "1" if has_padding else ""
    trainer.evaluate = change_environment({VARIABLE: ""})(trainer.evaluate)
    return has_padding
