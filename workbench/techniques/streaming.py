"""Streaming: the text is tokenised and packed while training runs; its tokens are never there as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from workbench.base.settings import setting
from workbench.base.tokens import encoded, labelled_rows, packed
from workbench.techniques.base import Call, Capability, Stage, Technique


@dataclass(frozen=True)
class Streaming(Technique):
    """The same blocks as without, in another order: only `shuffle_buffer` blocks are there to choose the next from.

    Host memory holds the buffer instead of the corpus. Device memory does not change: a batch is a batch. Datasets
    documentation, "Stream"; `IterableDataset.shuffle` explains the buffer.
    """

    shuffle_buffer: int = setting(256, "blocks to choose the next one from; 1: the order of the text", minimum=1)

    stage = Stage.EXAMPLES
    brings = frozenset({Capability.TRAINING_SET, Capability.STREAM})
    forbids = frozenset({Capability.TRAINING_SET})

    def examples(self) -> Call:
        return Call(stream_examples, {"shuffle_buffer": self.shuffle_buffer})


def stream_examples(
    text: Any,
    tokenizer: Any,
    length: int,
    batch: int,
    seed: int,
    shuffle_buffer: int,
) -> Any:
    """Blocks that are made while they are read, the next one drawn from `shuffle_buffer` of them."""
    from datasets import IterableDataset

    source = {"text": text, "tokenizer": tokenizer, "length": length, "batch": batch}
    stream = IterableDataset.from_generator(stream_blocks, gen_kwargs=source)
    return stream.shuffle(seed=seed, buffer_size=shuffle_buffer)


def stream_blocks(text: Any, tokenizer: Any, length: int, batch: int) -> Iterator[dict[str, list[int]]]:
    """Blocks of `length` tokens, in whole batches.

    The text is tokenised in the same pieces as for packed blocks; conversations come with their tokens, and are packed
    in the same way.
    """
    if isinstance(text, str):
        blocks = packed(encoded([text], tokenizer), length)
        all_rows: Iterator[Any] = ({"input_ids": block, "labels": block} for block in blocks)
    else:
        all_rows = labelled_rows(text, length)
    while True:
        rows = list(islice(all_rows, batch))
        if len(rows) < batch:  # the rest of the text does not fill one
            return
        yield from rows
