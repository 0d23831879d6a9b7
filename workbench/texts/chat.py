"""Conversations, which `formats` has read, become tokens with labels; usually only the answers count in the loss.

Tokens and labels are those of TRL's SFTTrainer (1.16, `assistant_only_loss`, `completion_only_loss`): in messages the
assistant's turns count, and after a prompt its completion. Prompt and completion are joined as they are and ended by
the tokenizer's end of text; messages are written by its chat template. Where a template has no `{% generation %}`,
which TRL requires, an answer is what the template adds to the conversation before it.
"""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.base.tokens import IGNORED
from workbench.texts.formats import is_counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS = "answers"
ALL = "all"
LOSSES = (ANSWERS, ALL)  # the choices of what counts
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The template for tokenizers that have none, such as GPT-2's: a line for each message, and calls in JSON.
TEMPLATE = (
    "{% if tools %}{{ 'tools: ' + tools | tojson + '\n' }}{% endif %}{% for message in messages %}"
    "{% if message.tool_calls %}{{ message.role + ': ' + (message.content or '') + "
    "message.tool_calls | tojson }}{% else %}{{ message.role + ': ' + message.content }}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}{% if "
    "add_generation_prompt %}assistant:{% endif %}"
)


def template_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the tokenizer's own chat template, or TEMPLATE."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else TEMPLATE


def label_tokens(line: str, tokenizer: "PreTrainedTokenizerBase", loss: str) -> list[tuple[int, int]]:
    """Return the tokens of a conversation, each with its label: the token itself, or IGNORED if it does not count.

    Args:
        line: the conversation in JSON.
        loss: ANSWERS or ALL.

    Raises:
        ValueError: the template writes the beginning of the conversation in another way than in the whole, so that
            nothing tells where an answer begins. Besides, whatever the template raises.
    """
    return labels_of(json.loads(line), tokenizer, template_of(tokenizer), loss == ANSWERS)


def labels_of(row: dict[str, Any], tokenizer: Any, template: str, answers: bool = True) -> list[tuple[int, int]]:
    """Return the tokens of a conversation, each with its label: the token itself if it counts, or -100.

    With `answers`, only tokens of answers count: those that the template marks, or else those of the text that the
    template adds to the conversation before the answer. Otherwise every token counts.
    """
    parts, write = parts_of(row, tokenizer, template)
    marks = None
    if answers and "messages" in row and GENERATION.search(template):
        marked = write(
            parts,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        # For each token, 1 if the template marks it as an answer. It marks answers that do not count, too.
        marks = marked["assistant_masks"]
        if all(is_counted(part) for part in parts):
            ids = marked["input_ids"]
            return [(token, token if counts else IGNORED) for token, counts in zip(ids, marks, strict=True)]
    text = write(parts)
    counted = bytearray(len(text))  # for each character, 1 if it counts
    turns = turns_of(row, parts) if answers else []
    for first, last in turns:
        before = write(parts[:first], add_generation_prompt=True) if first else ""
        until = write(parts[:last]) if last < len(parts) else text
        if not (text.startswith(until) and until.startswith(before)):
            raise ValueError("it writes the beginning of a conversation otherwise than the whole")
        counted[len(before) : len(until)] = b"\1" * (len(until) - len(before))
    # A template writes special tokens itself; a joined text gets those that the tokenizer adds.
    encoded = tokenizer(text, add_special_tokens=isinstance(parts, str), return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    pairs = []
    for token, (start, end), is_marked in zip(ids, encoded["offset_mapping"], marks or [1] * len(ids), strict=True):
        counts = is_marked and (not answers or any(counted[start:end]))
        pairs.append((token, token if counts else IGNORED))
    return pairs


def turns_of(row: dict[str, Any], parts: Any) -> list[tuple[int, int]]:
    """Return the first index and the end of each answer among the parts of a conversation."""
    if "messages" not in row:
        return [(len(row["prompt"]), len(parts))]
    return [(i, i + 1) for i, part in enumerate(parts) if part["role"] == "assistant" and is_counted(part)]


def parts_of(row: dict[str, Any], tokenizer: Any, template: str) -> tuple[Any, Any]:
    """Return a conversation's messages, or its one text with its end, and the function that writes it as a text.

    The function takes the parts, or the first of them.
    """
    end = str(tokenizer.eos_token or "")
    parts = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    if isinstance(parts, str):
        return parts.removesuffix(end) + end, as_it_is
    return parts, partial(tokenizer.apply_chat_template, tools=row.get("tools"), chat_template=template, tokenize=False)


def count_rewritten(row: dict[str, Any], tokenizer: Any) -> int:
    """Count the messages whose text the template changes, apart from the space around it."""
    parts, write = parts_of(row, tokenizer, template_of(tokenizer))
    if isinstance(parts, str):
        return 0
    text = write(parts)
    return sum((part.get("content") or "").strip() not in text for part in parts)


def as_it_is(text: str, **_: Any) -> str:
    """Write one text as it is, in place of a chat template."""
    return text
