"""Padding: examples of unequal length, filled up to equal length, instead of blocks packed from the whole text."""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

from workbench.errors import ConfigurationError
from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique
from workbench.texts.corpus import encoded


@dataclass(frozen=True)
class Padding(Technique):
    """One example a paragraph (in a play: a speech), ended by the end-of-text token, in pieces if longer than T.

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
        return Call(paragraph_examples, {"pad_to_length": not self.dynamic})

    def collator(self) -> Call:
        return Call(pad)

    def training_arguments(self, arguments: Arguments) -> Arguments:
        grouped = {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}
        return {**arguments, **(grouped if self.group_by_length else {})}


def paragraph_examples(text: str, tokenizer: Any, length: int, batch: int, seed: int, pad_to_length: bool) -> Any:
    """A training set of paragraphs. Raises ValueError if they do not fill a batch."""
    from datasets import Dataset

    rows = make_examples(text, tokenizer, length, batch)
    if not rows:
        few = f"the text has fewer than {batch} paragraphs or pieces of {length} tokens, not enough for one batch"
        raise ValueError(f"{few}. Use a longer text or a smaller effective_batch_size.")
    return Dataset.from_list([pad_to(row, length) for row in rows] if pad_to_length else rows)


def make_examples(text: str, tokenizer: Any, length: int, batch: int) -> list[dict[str, Any]]:
    """Paragraphs as rows of at most `length` tokens, each paragraph ended by the end-of-text token; whole batches."""
    pieces = []
    for paragraph in filter(str.strip, re.split(r"\n\s*\n", text)):
        tokens = [*chain.from_iterable(encoded([paragraph.strip()], tokenizer)), tokenizer.eos_token_id]
        # none begins at the last token: of a single one nothing is predicted
        pieces += [tokens[start : start + length] for start in range(0, len(tokens) - 1, length)]
    pieces = pieces[: len(pieces) // batch * batch]
    return [{"input_ids": piece, "attention_mask": [1] * len(piece), "length": len(piece)} for piece in pieces]


def pad_to(row: dict[str, Any], length: int) -> dict[str, Any]:
    """A row with `length` tokens; the added ones are left out by the attention mask."""
    padding = [0] * (length - len(row["input_ids"]))
    return {**row, "input_ids": row["input_ids"] + padding, "attention_mask": row["attention_mask"] + padding}


def pad(_: Any, rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """B rows to `input_ids`, `attention_mask` and `labels`, all (B, longest); what is padding is not predicted. Takes
    the place of a collator of rows that are equally long.

    The padding token is 0, but any would do: no token attends to it, and its label is -100.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    masks = [torch.tensor(row.get("attention_mask", [1] * len(row["input_ids"]))) for row in rows]
    input_ids = pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True, padding_value=0)
    attention_mask = pad_sequence(masks, batch_first=True, padding_value=0)
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
