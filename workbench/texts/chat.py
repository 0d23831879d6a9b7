"""Conversations: rows of `messages`, of `conversations` (ShareGPT's), or of `prompt` and `completion`, to tokens of
which the answers count.

Tokens and labels are those of TRL's SFTTrainer (1.16, `assistant_only_loss`, `completion_only_loss`): of messages the
assistant's turns count, of a prompt and its completion the completion. Two texts are joined as they are and ended by
the tokenizer's end of text; messages are written by its chat template. Where that has no `{% generation %}`, which TRL
asks for, an answer is what the template adds to the conversation before it.
"""

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic wants this one, up to Python 3.11

from workbench.base.settings import checker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS = "answers"
ALL = "all"
LOSSES = (ANSWERS, ALL)
IGNORED = -100  # the label of what does not count
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# how messages are written for a tokenizer that has no template, such as GPT-2's: a line for each
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Message(TypedDict):
    """What someone says, and more; the content is null where the assistant calls a tool."""

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    role: str
    content: str | list[Any] | None


Messages = Annotated[list[Message], MinLen(1)]


class Conversation(TypedDict):
    """Of these messages the assistant's turns count."""

    messages: Messages


class Texts(TypedDict):
    """Of these two the completion counts."""

    prompt: str
    completion: str


class Exchange(TypedDict):
    """Messages, and those that answer them, which count."""

    prompt: Messages
    completion: Messages


ROWS = ("messages", "conversations", "prompt,completion")  # the columns of a row, with commas


def in_one_line(columns: str, values: Any) -> str | None:
    """A conversation as one line of JSON; None for a null. Raises ValueError if it is none.

    Args:
        values: what the row has in these columns: of several a tuple.
    """
    if "," in columns:
        row = dict(zip(columns.split(","), values, strict=True))
    elif columns == "conversations" and isinstance(values, list):
        row = {"messages": [as_message(message) for message in values]}
    else:
        row = {"messages": values}
    if None in row.values():
        return None
    check = checker(_shape(row))
    try:
        conversation = check.validate_python(row)
    except ValueError as error:
        fault = error.errors()[0]  # type: ignore[attr-defined]  # pydantic's
        raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None
    return str(check.dump_json(conversation, exclude_none=True), "utf-8")


def _shape(row: dict[str, Any]) -> type:
    """Which of the three kinds of rows it is meant to be."""
    if "messages" in row:
        return Conversation
    if isinstance(row["prompt"], str) or isinstance(row["completion"], str):
        return Texts
    return Exchange


def as_message(message: Any) -> Any:
    """What someone says, ShareGPT's `from` and `value` by the names that templates know."""
    if not isinstance(message, dict):
        return message
    names = {"from": "role", "value": "content"}
    roles = {"human": "user", "gpt": "assistant"}
    renamed = {}
    for name, value in message.items():
        is_role = name == "from" and isinstance(value, str)
        renamed[names.get(name, name)] = roles.get(value, value) if is_role else value
    return renamed


def template_of(tokenizer: "PreTrainedTokenizerBase") -> str:
    """The tokenizer's own chat template, or TEMPLATE."""
    return tokenizer.get_chat_template() if tokenizer.chat_template else TEMPLATE


def labelled(line: str, tokenizer: "PreTrainedTokenizerBase", loss: str) -> list[tuple[int, int]]:
    """The tokens of a conversation, each with its label: itself, or IGNORED if it does not count.

    Raises:
        ValueError: the template writes the beginning of the conversation otherwise than the whole, so that nothing
            tells where an answer begins; or whatever the template raises.
    """
    return labels_of(json.loads(line), tokenizer, template_of(tokenizer), loss == ANSWERS)


def labels_of(row: Any, tokenizer: Any, template: str, answers: bool = True) -> list[tuple[int, int]]:
    """The tokens of a conversation, each with its label: itself where an answer is, or everywhere.

    The template marks what is an answer, or else it is what the template adds to the conversation before it.
    """
    parts, write = parts_of(row, tokenizer, template)
    if answers and "messages" in row and GENERATION.search(template):
        marked = write(
            parts,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        marks = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
        return [(token, token if counts else IGNORED) for token, counts in marks]
    text = write(parts)
    counted = bytearray(len(text))  # a character each: 1 where it counts
    turns = turns_of(row, parts) if answers else []
    for first, last in turns:
        before = write(parts[:first], add_generation_prompt=True) if first else ""
        until = write(parts[:last]) if last < len(parts) else text
        if not (text.startswith(until) and until.startswith(before)):
            raise ValueError("it writes the beginning of a conversation otherwise than the whole")
        counted[len(before) : len(until)] = b"\1" * (len(until) - len(before))
    # a template writes special tokens itself
    encoded = tokenizer(text, add_special_tokens=isinstance(parts, str), return_offsets_mapping=True, verbose=False)
    pairs = []
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        counts = not answers or any(counted[start:end])
        pairs.append((token, token if counts else IGNORED))
    return pairs


def turns_of(row: Any, parts: Any) -> list[tuple[int, int]]:
    """Where answers begin and end among the parts of a conversation."""
    if "messages" not in row:
        return [(len(row["prompt"]), len(parts))]
    return [(i, i + 1) for i, part in enumerate(parts) if part["role"] == "assistant"]


def parts_of(row: Any, tokenizer: Any, template: str) -> tuple[Any, Any]:
    """What is said, messages or one text with its end, and the function that writes them, or the first of them."""
    end = str(tokenizer.eos_token or "")
    parts = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    if isinstance(parts, str):
        return parts.removesuffix(end) + end, as_it_is
    return parts, partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)


def as_it_is(text: str, **_: Any) -> str:
    return text
