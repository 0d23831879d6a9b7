"""The formats of examples that are read: `FORMATS` is the contract, and each function reads one of them.

An example is a row of a file, a dictionary of its columns. The functions use nothing of the other files; an exported
script has the one that it needs.

Tokens and labels follow TRL (1.16). A prompt and its completion are joined as they are; messages, and an instruction
and its output, are written by the chat template.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

# The entries of a ShareGPT message, and the roles in both kinds of messages, with the names that templates use.
ENTRIES = {"from": "role", "value": "content"}
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
CALLS = {"tool_calls", "function_call"}  # a message with one of these entries needs no content
# Entries of an assistant's message. 0 or false: it is not to be learned.
COUNTED = ("weight", "train", "loss", "loss_weight")
# The beginning of messages as JSON or Python writes them into a text.
MESSAGES_IN_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']""")
NULL = "null texts"  # a reason why examples are left out


class UnknownRoleError(ValueError):
    """The role of a message is unknown."""


# ---- an example as a conversation: each function returns a dictionary, or the reason why the example is left out ----


def read_messages(example: dict[str, Any], column: str) -> dict[str, Any] | str:
    """Read a column of messages. The columns `system` and `tools` may belong to them."""
    messages = parse_list(example.get(column))
    if messages is None:
        return NULL
    if messages == []:
        return "conversations without messages"
    messages = messages_of(messages)
    has_system = messages[0]["role"] == "system"  # then the column of the system is not used
    return {"messages": messages if has_system else [*system_of(example), *messages], **tools_of(example)}


def read_completion(example: dict[str, Any], prompt_column: str, completion_column: str) -> dict[str, Any] | str:
    """Read a prompt and its completion: two texts, or messages and the messages that answer them."""
    prompt = messages_or_text(example.get(prompt_column))
    completion = messages_or_text(example.get(completion_column))
    if prompt is None or completion is None:
        return NULL
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    answers = [assistant_message(completion)] if isinstance(completion, str) else messages_of(completion)
    return {"prompt": messages_of(prompt), "completion": answers, **tools_of(example)}


def read_instruction(
    example: dict[str, Any], instruction_column: str, output_column: str, input_column: str
) -> dict[str, Any] | str:
    """Read an instruction, to which the input may add something after a blank line, and its output."""
    instruction = example.get(instruction_column)
    output = example.get(output_column)
    added = example.get(input_column) if input_column else None  # a CSV file may have a column without a name
    if instruction is None or output is None:
        return NULL
    for name, value in ((instruction_column, instruction), (input_column, added or ""), (output_column, output)):
        if not isinstance(value, str):
            raise ValueError(f"{name!r} is no text")
    question = {"role": "user", "content": "\n\n".join(part for part in (instruction, added) if part)}
    return {"messages": [*system_of(example), question, assistant_message(output)], **tools_of(example)}


def messages_or_text(value: Any) -> Any:
    """Return the list of messages that a text holds in JSON; any other value stays. Raises ValueError as `parse_list`
    does."""
    is_list = isinstance(value, str) and MESSAGES_IN_TEXT.match(value)
    return parse_list(value) if is_list else value


def assistant_message(text: str) -> dict[str, Any]:
    """Return an answer as a message."""
    return {"role": "assistant", "content": text}


def system_of(example: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the message of the system as a list, which is empty if no column has one. Raises ValueError: it is no
    text."""
    system = example.get("system")
    if not isinstance(system or "", str):
        raise ValueError(f"'system' is {system!r:.60}, not a text")
    return [{"role": "system", "content": system}] if system else []


def tools_of(example: dict[str, Any]) -> dict[str, Any]:
    """Return the tools that a conversation may use as `{"tools": […]}`, or an empty dictionary.

    Raises ValueError: they are no list.
    """
    tools = parse_list(example.get("tools"))
    if not tools:
        return {}
    if not isinstance(tools, list):
        raise ValueError(f"the tools are a {type(tools).__name__}, not a list")
    return {"tools": tools}


def parse_list(value: Any) -> Any:
    """Return the list that a text holds in JSON, as a CSV file has it. A blank text becomes None; another value stays.

    Raises ValueError: the text begins like a list and is no JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    if not value.lstrip().startswith("["):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(
            f"{value!r:.60} is no JSON ({error}). If Python printed it, write it with json.dumps"
        ) from None


def parse_json(text: str) -> Any:
    """Parse JSON. Raises ValueError: an object has a name twice, of which most parsers keep the last without a word."""
    return json.loads(text, object_pairs_hook=as_object)


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError: a name is there twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {name!r} is there twice in one object: keep one of the two")
    return row


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Read a list of messages. Raises as `as_message` does."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r:.60} is no list of messages")
    return [as_message(message) for message in value]


def as_message(message: Any) -> dict[str, Any]:
    """Return a message with the names of entries and roles that templates use.

    Raises:
        UnknownRoleError: nobody with such a role is known.
        ValueError: it is no message, or a part of it is not what it should be.
    """
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.60} is no message")
    names = {} if "role" in message else ENTRIES
    if names and any(plain in message for name, plain in ENTRIES.items() if name in message):
        raise ValueError(f"{message!r:.60} has both names of an entry, such as value and content")
    entries: dict[str, Any] = {
        names.get(str(name), str(name)): value for name, value in message.items() if value is not None
    }
    role = entries.pop("role", None)
    if not isinstance(role, str):
        raise ValueError(f"{message!r:.60} has no role")
    if role not in ROLES:
        raise UnknownRoleError(role)
    content = entries.pop("content", None)
    calls = calls_of(content) if role == "function_call" else []
    if calls:
        entries["tool_calls"] = calls
        content = None
    if isinstance(content, list):
        content = text_of_parts(content)
    for name in COUNTED:
        if entries.get(name) not in (None, 0, 1):
            raise ValueError(f"{name} is {entries[name]!r:.40}: only 0 and 1, or false and true, are known")
    spoken: dict[str, Any] = {"role": ROLES[role]}
    if content is not None or not entries.keys() & CALLS:
        if not isinstance(content, str):
            raise ValueError(f"{message!r:.60} has no content that is a text")
        spoken["content"] = content
    return spoken | entries


def text_of_parts(parts: list[Any]) -> str:
    """Join the parts of a content. Raises ValueError: a part is no text, such as an image."""
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(
                f"the part {part!r:.60} of a message has no entry `text`, and nothing else is learned from"
            )
    return "".join(part["text"] for part in parts)


def calls_of(text: Any) -> list[dict[str, Any]]:
    """Return the calls in a text of ShareGPT's as templates use them; empty if the text is no call."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return []
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return []
    return [{"type": "function", "function": call} for call in calls]


# ---- the contract ----


class Format(NamedTuple):
    """A format of examples.

    Attributes:
        columns: the columns that it needs, by the names of the contract.
        optional: a column that it may have, by its name in the contract.
        around: columns of these names belong to the conversation, if an example has them.
        read: makes a conversation of an example, or returns the reason why it is left out; None for a text.
    """

    columns: tuple[str, ...]
    read: Callable[..., dict[str, Any] | str] | None = None
    optional: tuple[str, ...] = ()
    around: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """The columns that `read` takes after the example."""
        return (*self.columns, *self.optional)

    def address(self, columns: Collection[str]) -> str:
        """Return the options that name those of its columns that are among these."""
        return ",".join(f"{name}={name}" for name in self.arguments if name in columns)


TEXT = Format(("text",))
FORMATS = (
    TEXT,
    Format(("messages",), read_messages, around=("system", "tools")),
    Format(("conversations",), read_messages, around=("system", "tools")),
    Format(("prompt", "completion"), read_completion, around=("tools",)),
    Format(("instruction", "output"), read_instruction, ("input",), around=("system", "tools")),
)
# Examples that are recognized and cannot be trained on as they are, each by columns of which it has all.
REJECTED = {
    ("chosen", "rejected"): "it has preferences, which supervised training does not use",
    ("kto_tag",): "it has the labels of KTO, which supervised training does not use",
    ("label",): "it has labels, as for KTO or a classifier, which supervised training does not use",
    ("labels",): "it has labels, as for a classifier or of tokens, which supervised training does not use",
    ("input_ids",): "it has the tokens of some tokenizer: give the texts that they were made of",
    ("role", "content"): "each row is one message, and none says to which conversation it belongs",
    ("from", "value"): "each row is one message, and none says to which conversation it belongs",
}


def formats_of(names: Iterable[str]) -> list[Format]:
    """Return the formats whose columns are all among these names."""
    return [form for form in FORMATS if {*form.columns} <= {*names}]


def roles_in(example: dict[str, Any], columns: Iterable[str]) -> Iterator[str]:
    """Yield the role of each message in these columns of an example, by the file's own names."""
    for column in columns:
        messages = messages_or_text(example.get(column))
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict):
                yield str(message.get("role", message.get("from")))


# ---- remarks on what is not learned ----


def tally_remarks(tally: Counter[str], written: Counter[str], conversation: dict[str, Any]) -> None:
    """Count the parts of a conversation that are not learned, though they look as if they were.

    Args:
        tally: counts them, by a phrase for a remark.
        written: counts the entries of messages that a template may leave out, and the tools.
    """
    written["tools"] += bool(conversation.get("tools"))
    if isinstance(conversation.get("completion"), str):
        tally["answers are empty"] += not conversation["completion"].strip()
        run_on = "completions follow their prompt without a space: they are joined as they are"
        tally[run_on] += is_run_on(conversation["prompt"], conversation["completion"])
        return
    messages = conversation.get("messages") or [*conversation["prompt"], *conversation["completion"]]
    answers = [message for message in messages if message["role"] == "assistant"]
    tally["conversations have no answer, so that nothing of them counts"] += not answers
    for message in messages:
        written.update(message.keys() - {"role", "content", *COUNTED})
    for message in answers:
        tally["answers are not to be counted (weight 0, train or loss false)"] += not is_counted(message)
        tally["answers are empty"] += not ((message.get("content") or "").strip() or message.get("tool_calls"))


def is_run_on(prompt: str, completion: str) -> bool:
    """Whether the completion begins with a letter directly after the prompt's last letter or punctuation mark."""
    last = prompt[-1:]
    return completion[:1].isalnum() and (last.isalnum() or last in (".", "?", "!", ":", ","))


def is_counted(message: dict[str, Any]) -> bool:
    """Whether an assistant's message is to be learned."""
    return all(message.get(name) in (None, 1) for name in COUNTED)
