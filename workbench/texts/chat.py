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

from workbench.paths import beside
from workbench.settings import checker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS, ALL = LOSSES = ("answers", "all")
IGNORED = -100  # the label of what does not count
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE: str = beside(__file__, "chat.toml")["template"]  # for a tokenizer that has none, such as GPT-2's


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
    """A conversation as one line of JSON; None for a null. Raises ValueError if it is none."""
    if columns == "conversations":
        columns, values = "messages", [*map(as_message, values)] if isinstance(values, list) else values
    row = dict(zip(columns.split(","), values if "," in columns else [values], strict=True))
    kind = Texts if "," in columns and str in map(type, values or ()) else Exchange if "," in columns else Conversation
    check = checker(kind)
    try:
        said = None if None in row.values() else check.validate_python(row)
    except ValueError as error:
        found = error.errors()[0]  # type: ignore[attr-defined]  # pydantic's
        raise ValueError(f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from None
    return said and str(check.dump_json(said, exclude_none=True), "utf-8")


def as_message(said: Any) -> Any:
    """What someone says, ShareGPT's `from` and `value` by the names that templates know."""
    names, roles = {"from": "role", "value": "content"}, {"human": "user", "gpt": "assistant"}
    if not isinstance(said, dict):
        return said
    return {names.get(name, name): roles.get(value, value) if name == "from" else value for name, value in said.items()}


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
    """The tokens of a conversation, each with its label: itself where an answer is, or everywhere. What is one the
    template tells, or what it adds to the conversation before it."""
    parts, write = parts_of(row, tokenizer, template)
    if answers and "messages" in row and GENERATION.search(template):
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = write(parts, **asked, tokenizer_kwargs={"verbose": False})
        return [(i, i if n else IGNORED) for i, n in zip(found["input_ids"], found["assistant_masks"], strict=True)]
    turns = [(i, i + 1) for i, part in enumerate(parts) if "messages" in row and part["role"] == "assistant"]
    turns = turns if "messages" in row else [(len(row["prompt"]), len(parts))]
    whole = write(parts)
    counted = bytearray(len(whole))
    for first, last in turns if answers else ():
        start = write(parts[:first], add_generation_prompt=True) if first else ""
        until = write(parts[:last]) if last < len(parts) else whole
        if not (whole.startswith(until) and until.startswith(start)):
            raise ValueError("it writes the beginning of a conversation otherwise than the whole")
        counted[len(start) : len(until)] = b"\1" * (len(until) - len(start))
    # a template writes special tokens itself
    found = tokenizer(whole, add_special_tokens=isinstance(parts, str), return_offsets_mapping=True, verbose=False)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [(i, i if not answers or any(counted[start:end]) else IGNORED) for i, (start, end) in pairs]


def parts_of(row: Any, tokenizer: Any, template: str) -> tuple[Any, Any]:
    """What is said, messages or one text with its end, and the function that writes them, or the first of them."""
    end = str(tokenizer.eos_token or "")
    parts = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    if isinstance(parts, str):
        return parts.removesuffix(end) + end, as_it_is
    return parts, partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)


def as_it_is(text: str, **_: Any) -> str:
    return text
