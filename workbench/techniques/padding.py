"""Padding: examples of unequal length, filled up to equal length, instead of blocks packed from the whole text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from workbench.errors import ConfigurationError
from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique
from workbench.texts.corpus import encoded


@dataclass(frozen=True)
class Padding(Technique):
    """One example a paragraph (in a play: a speech), ended by the end-of-text token, or a conversation, in pieces if
    longer than T.

    `dynamic` pads a batch to its longest example, otherwise all are padded to T ahead. `group_by_length` forms batches
    of examples of about equal length, from random groups of 50 batches, each group from long to short (transformers'
    `get_length_grouped_indices`): a run of fewer steps sees the longer examples only.

    Padding is left out of attention and loss; the label -100 marks it, by position: whoever masks every label equal to
    the padding token masks the real ends too, where the two are the same token, as they usually are with GPT-2.
    """

    dynamic: bool = setting(True, "pad to the longest example of the batch; false: always to T tokens")
    group_by_length: bool = setting(False, "batches of examples of about equal length; needs dynamic padding")

    stage = Stage.EXAMPLES
    brings = frozenset({Capability.TRAINING_SET})
    forbids = frozenset({Capability.TRAINING_SET})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_by_length and not self.dynamic:
            idle = "group_by_length changes nothing if every example is padded to T"
            raise ConfigurationError(f"{self.name}: {idle}. Set dynamic to true.")
        if self.dynamic:
            object.__setattr__(self, "brings", self.brings | {Capability.UNEQUAL_BATCHES})

    def examples(self) -> Call:
        return Call(separate_examples, {"pad_to_length": not self.dynamic})

    def collator(self) -> Call:
        return Call(pad)

    def training_arguments(self, arguments: Arguments) -> Arguments:
        grouped = {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}
        return {**arguments, **(grouped if self.group_by_length else {})}


def separate_examples(text: Any, tokenizer: Any, length: int, batch: int, seed: int, pad_to_length: bool) -> Any:
    """A training set of paragraphs or conversations. Raises ValueError if they do not fill a batch."""
    from datasets import Dataset

    rows = make_examples(text, tokenizer, length, batch)
    if not rows:
        few = f"the text has fewer than {batch} paragraphs or pieces of {length} tokens, not enough for one batch"
        raise ValueError(f"{few}. Use a longer text or a smaller effective_batch_size.")
    return Dataset.from_list([pad_to(row, length) for row in rows] if pad_to_length else rows)


def make_examples(text: Any, tokenizer: Any, length: int, batch: int) -> list[dict[str, Any]]:
    """Paragraphs or conversations as rows of at most `length` tokens, of which one is predicted; whole batches."""
    pieces = []
    for pairs in paragraphs(text, tokenizer) if isinstance(text, str) else text:
        pieces += [pairs[start : start + length] for start in range(0, len(pairs), length)]
    pieces = [[*map(list, zip(*piece, strict=True))] for piece in pieces]
    rows = [(ids, told) for ids, told in pieces if {*told[1:]} - {-100}]
    rows = rows[: len(rows) // batch * batch]
    return [{"input_ids": i, "labels": told, "attention_mask": [1] * len(i), "length": len(i)} for i, told in rows]


def paragraphs(text: str, tokenizer: Any) -> Iterator[list[tuple[int, int]]]:
    """Each as tokens, ended by the end of text, with their labels: all count."""
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        tokens = [*chain.from_iterable(encoded([paragraph.strip()], tokenizer)), tokenizer.eos_token_id]
        yield [*zip(tokens, tokens, strict=True)]


# The padding token is 0, but any would do: no token attends to it, and its label is -100.
FILLING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def pad_to(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row with `length` tokens; the added ones are left out by the attention mask and have no label."""
    return {**row, **{name: row[name] + [value] * (length - len(row[name])) for name, value in FILLING.items()}}


def pad(_: Any, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """B rows to `input_ids`, `attention_mask` and `labels`, all (B, longest); what is padding is not predicted. Takes
    the place of a collator of rows that are equally long."""
    import torch

    whole = [{"attention_mask": [1] * len(row["input_ids"]), "labels": row["input_ids"], **row} for row in rows]
    padded = [pad_to(row, max(len(each["input_ids"]) for each in rows)) for row in whole]
    return {name: torch.tensor([row[name] for row in padded]) for name in FILLING}
