"""Padding: examples of unequal length are filled up to equal length; the text is not packed into blocks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.base.tokens import encode_text
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


@dataclass(frozen=True)
class Padding(Technique):
    """An example is a paragraph (in a play: a speech), ended by the end-of-text token, or a conversation. One of more
    than T tokens is cut into pieces.

    `dynamic` pads a batch to its longest example, otherwise all are padded to T ahead. `group_by_length` forms batches
    of examples of about equal length, from random groups of 50 batches, each group from long to short (transformers'
    `get_length_grouped_indices`): a run of fewer steps sees the longer examples only. The peak is as high: the first
    batch is padded to the longest example. With accumulation the recipe's argument `train_sampling_strategy` may be
    "batch_rebalance", which deals the examples of a step out by their cost and lowers the peak.

    Padding is left out of attention and loss. Its positions get the label -100. To mask every label that equals the
    padding token instead would mask the real ends of texts too: with GPT-2 the two are usually the same token.
    """

    dynamic: bool = setting(True, "pad to the longest example of the batch; false: always to T tokens")
    group_by_length: bool = setting(False, "batches of examples of about equal length; needs dynamic padding")

    stage = Stage.EXAMPLES
    brings = frozenset({Capability.TRAINING_SET})
    forbids = frozenset({Capability.TRAINING_SET})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_by_length and not self.dynamic:
            raise ConfigurationError(
                f"{self.name}: group_by_length changes nothing if every example is padded to T. Set dynamic to true."
            )
        if self.dynamic:
            object.__setattr__(self, "brings", self.brings | {Capability.UNEQUAL_BATCHES})

    def examples(self) -> Call:
        return Call(separate_examples, {"pad_to_length": not self.dynamic})

    def collator(self) -> Call:
        return Call(pad)

    def training_arguments(self, arguments: Arguments) -> Arguments:
        if not self.group_by_length:
            return arguments
        return {**arguments, "train_sampling_strategy": "group_by_length", "length_column_name": "length"}


def separate_examples(text: Any, tokenizer: Any, length: int, batch: int, seed: int, pad_to_length: bool) -> Any:
    """Make a training set of paragraphs or conversations. Raises ValueError if they do not fill an effective batch."""
    from datasets import Dataset

    rows = make_examples(text, tokenizer, length, batch)
    if not rows:
        raise ValueError(
            f"the text has fewer than {batch} paragraphs or pieces of {length} tokens, not enough "
            "for one batch. Use a longer text or a smaller effective_batch_size."
        )
    if pad_to_length:
        rows = [pad_to(row, length) for row in rows]
    return Dataset.from_list(rows)


def make_examples(text: Any, tokenizer: Any, length: int, batch: int) -> list[dict[str, Any]]:
    """Return paragraphs, or conversations, as rows of at most `length` tokens, in whole effective batches.

    A row without a label to predict is left out: all its labels are -100, or only the first is not, which no token
    precedes.
    """
    documents = paragraphs(text, tokenizer) if isinstance(text, str) else text
    rows = []
    for document in documents:  # a document is a list of pairs of a token and its label
        for start in range(0, len(document), length):
            ids, labels = map(list, zip(*document[start : start + length], strict=True))
            if set(labels[1:]) - {-100}:
                rows.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids), "length": len(ids)})
    return rows[: len(rows) // batch * batch]


def paragraphs(text: str, tokenizer: Any) -> Iterator[list[tuple[int, int]]]:
    """Yield each paragraph, ended by the end-of-text token, as pairs of a token and its label, the token itself."""
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        tokens = [*chain.from_iterable(encode_text([paragraph.strip()], tokenizer)), tokenizer.eos_token_id]
        yield [(token, token) for token in tokens]


# The values of padding. Any token would do: none attends to it, and its label is -100.
FILLING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def pad_to(row: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a row of `length` tokens. The attention mask leaves out the added ones, and they have no label."""
    padded = dict(row)
    for name, value in FILLING.items():
        padded[name] = row[name] + [value] * (length - len(row[name]))
    return padded


def pad(_: Any, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Make a batch of B rows: `input_ids`, `attention_mask` and `labels`, all (B, longest). Padding is not predicted.

    The first argument is the collator for rows of equal length, whose place it takes.
    """
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    padded = []
    for row in rows:
        # The blocks of an evaluation have no mask, and if all tokens count, no labels.
        whole = {"attention_mask": [1] * len(row["input_ids"]), "labels": row["input_ids"], **row}
        padded.append(pad_to(whole, longest))
    return {name: torch.tensor([row[name] for row in padded]) for name in FILLING}
