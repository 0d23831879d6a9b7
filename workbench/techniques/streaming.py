"""Streaming: the text is tokenised and packed while training runs; its tokens never exist as a whole."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from workbench.base.settings import setting
from workbench.base.tokens import encode_text, pack_blocks, pack_conversations
from workbench.techniques.base import Call, Capability, Stage, Technique


@dataclass(frozen=True)
class Streaming(Technique):
    """The blocks are those of any run, in another order: the next one is drawn from `shuffle_buffer` blocks alone.

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
    """Return a dataset whose blocks are made while they are read; the next is drawn from `shuffle_buffer` of them."""
    from datasets import IterableDataset

    source = {"text": text, "tokenizer": tokenizer, "length": length, "batch": batch}
    stream = IterableDataset.from_generator(stream_blocks, gen_kwargs=source)
    return stream.shuffle(seed=seed, buffer_size=shuffle_buffer)


def stream_blocks(text: Any, tokenizer: Any, length: int, batch: int) -> Iterator[dict[str, list[int]]]:
    """Yield blocks of `length` tokens, in whole effective batches.

    The text is tokenised in the same pieces as for packed blocks. Conversations come with their tokens, and are packed
    as without streaming.
    """
    if isinstance(text, str):
        blocks = pack_blocks(encode_text([text], tokenizer), length)
        all_rows: Iterator[Any] = ({"input_ids": block, "labels": block} for block in blocks)
    else:
        all_rows = pack_conversations(text, length)
    while True:
        rows = list(islice(all_rows, batch))
        if len(rows) < batch:  # the rest of the text does not fill a batch
            return
        yield from rows
