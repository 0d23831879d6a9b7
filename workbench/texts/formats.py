"""The kinds of rows that people have, recognised by their columns, and the conversation in a row of each kind.

`FORMATS` is the table of the kinds: columns, the function that reads a row, and a title. The functions use nothing of
the other files; an exported script has the one that it needs.

Tokens and labels follow TRL (1.16). A prompt and its completion are joined as they are; questions and answers under any
other names become messages, which the chat template writes. In a preference the chosen answer counts, as in TRL's SFT
on such data. If the prompt has no column, it is the common beginning of the chosen and the rejected text. The names of
ShareGPT's roles are those of FastChat, LLaMA-Factory and axolotl.
"""

import ast
import json
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from itertools import pairwise, product, starmap
from os.path import commonprefix
from typing import Any, NamedTuple

# Other programs' names for the entries and the roles of a message, each with the name that templates use.
NAMES = {"from": "role", "value": "content", "text": "content"}
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
CALLS = {"tool_calls", "function_call"}  # a message with one of these entries needs no content
# Entries of an assistant's message. 0 or false: it is not to be learned.
COUNTED = ("weight", "train", "loss", "loss_weight")
# Columns with a question, and columns with its answer.
ASKING = ("instruction", "question", "query", "problem", "prompt", "input", "inputs", "user", "human")
ANSWERING = ("output", "response", "answer", "completion", "solution", "targets", "assistant")
BESIDE = ("input", "context")  # columns that add something to a question
CHATS = ("messages", "conversations", "conversation")
NO_TEXT = "parts_without_text"  # an entry that `as_message` adds, for remarks
# Reasons why rows are left out.
NULL = "null texts"
DISLIKED = "rows whose label is false"


class UnknownRoleError(ValueError):
    """The role of a message is unknown."""


# ---- a row as a conversation: each function returns a dictionary, or the reason why the row is left out ----


def chat(row: Any, column: str) -> Any:
    """Read a column of messages. Columns beside it may have a message of the system and tools."""
    messages = as_list(row.get(column))
    if messages is None:
        return NULL
    if messages == []:
        return "conversations without messages"
    if is_disliked(row):
        return DISLIKED
    messages = messages_of(messages)
    has_system = messages[0]["role"] == "system"  # then the column of the system is not used
    return {"messages": messages if has_system else [*system_of(row), *messages], **tools_of(row)}


def exchange(row: Any, prompt: str = "prompt", completion: str = "completion") -> Any:
    """Read two columns: a prompt and its completion, or messages and the messages that answer them."""
    first = row.get(prompt)
    second = row.get(completion)
    if first is None or second is None:
        return NULL
    if is_disliked(row):
        return DISLIKED
    if isinstance(first, str) and isinstance(second, str):
        return {"prompt": first, "completion": second}
    before = messages_of(first)
    answers = [answer_of(second)] if isinstance(second, str) else messages_of(second)
    return {"prompt": before, "completion": answers, **tools_of(row)}


def instruction(row: Any, question_column: str, answer_column: str) -> Any:
    """Read a question, to which other columns may add something after a blank line, and its answer."""
    answer = row.get(answer_column)
    if row.get(question_column) is None or answer is None:
        return NULL
    if is_disliked(row):
        return DISLIKED
    return {"messages": [*system_of(row), question(row, question_column), answer_of(answer)], **tools_of(row)}


def preference(row: Any, question_column: str, chosen_column: str = "chosen", other: str = "rejected") -> Any:
    """Read a question and the chosen one of two answers. Without a question, the common beginning of both is one."""
    chosen = row.get(chosen_column)
    prompt = row.get(question_column) if question_column else ""
    if chosen is None or prompt is None:
        return NULL
    if isinstance(chosen, str) and not question_column:
        prompt = commonprefix([chosen, row.get(other) or ""]).removesuffix(" ")  # TRL does so  # noqa: RUF071
        chosen = chosen[len(prompt) :]
        return {"prompt": prompt, "completion": chosen} if chosen else "pairs of equal answers"
    around = system_of(row) if question_column else []
    is_alone = not (around or row.get("input") or row.get("context"))
    if is_alone and question_column == "prompt" and isinstance(prompt, str) and isinstance(chosen, str):
        return {"prompt": prompt, "completion": chosen}
    answers = messages_of(chosen) if isinstance(chosen, list) else [answer_of(chosen)]
    if isinstance(prompt, list):
        before = messages_of(prompt)
    elif len(answers) > 1:  # the messages of the answer repeat the question
        before = answers[:-1]
        answers = answers[-1:]
    elif question_column:
        before = [question(row, question_column)]
    else:
        return "answers without a question"
    return {"prompt": [*around, *before], "completion": answers, **tools_of(row)}


def answer_of(answer: Any) -> Any:
    """Make the assistant's message of an answer, which is a text or a message already."""
    return as_message(answer if isinstance(answer, dict) else {"role": "assistant", "content": answer})


def question(row: Any, question_column: str) -> Any:
    """Make the user's message of a question and of the columns that add something to it."""
    parts = [row[question_column], *(row[name] for name in BESIDE if name != question_column and row.get(name))]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{question_column!r}, or what stands beside it, is no text")
    return {"role": "user", "content": "\n\n".join(parts)}


def system_of(row: Any) -> Any:
    """Return the message of the system as a list, which is empty if no column has one."""
    system = row.get("system") or row.get("system_prompt")
    if not system:
        return []
    return [{"role": "system", "content": system}]


def tools_of(row: Any) -> Any:
    """Return the tools that a conversation may use as `{"tools": […]}`, or an empty dictionary."""
    tools = as_list(row.get("tools") or row.get("functions"))
    if not tools:
        return {}
    if not isinstance(tools, list):
        raise ValueError(f"the tools are a {type(tools).__name__}, not a list")
    return {"tools": tools}


def is_disliked(row: Any) -> bool:
    """Whether KTO's label says that the answer is bad. Names and numbers of classes are no such labels."""
    label = row.get("label", row.get("kto_tag"))
    return str(label).lower() == "false"  # a table may hold it as a text


def as_list(value: Any) -> Any:
    """Return the list that a text holds, in JSON or as Python or numpy print it; any other value stays as it is.

    A blank text becomes None.
    """
    if not isinstance(value, str):
        return value
    if not value.strip().startswith("["):
        return value if value.strip() else None
    try:
        return json.loads(value)
    except ValueError:
        pass
    try:
        tokens = [word.string for word in tokenize.generate_tokens(StringIO(value).readline) if word.string.strip()]
        for place, pair in enumerate(pairwise(tokens)):
            if pair == ("}", "{"):  # numpy prints no commas
                tokens[place] = "},"
        return ast.literal_eval(" ".join(tokens))
    except (ValueError, SyntaxError, tokenize.TokenError, MemoryError, RecursionError):
        return value


def messages_of(value: Any) -> Any:
    """Read a list of messages. Raises as `as_message` does."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r:.60} is no list of messages")
    messages = []
    for turn in value:
        messages += turn_of(turn)
    return messages


def turn_of(turn: Any) -> Any:
    """Read a turn of a conversation: a message, or an object with a question and its answer, which are two.

    Such an object may have a message of the system too. Raises as `as_message` does.
    """
    if not isinstance(turn, dict) or "role" in turn or "from" in turn:
        return [as_message(turn)]
    asking = [name for name in ASKING if name in turn]
    answering = [name for name in ANSWERING if name in turn]
    if len(asking) != 1 or len(answering) != 1:
        return [as_message(turn)]
    return [*system_of(turn), question(turn, asking[0]), answer_of(turn[answering[0]])]


def as_message(message: Any) -> Any:
    """Return a message with the names of entries and roles that templates use.

    Raises:
        UnknownRoleError: nobody with such a role is known.
        ValueError: it is no message, or a part of it is not what it should be.
    """
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.60} is no message")
    renamed = {}
    for name, value in message.items():
        plain = NAMES.get(name, name)  # if the message has this name already, the other entry stays as it is
        if value is not None:
            renamed[name if plain in message else plain] = value
    role = renamed.pop("role", None)
    if not isinstance(role, str):
        raise ValueError(f"{message!r:.60} has no role")
    if role.lower() not in ROLES:
        raise UnknownRoleError(role)
    if role == "function_call":
        renamed |= calls_of(renamed.get("content"))
    for name in COUNTED:
        if renamed.get(name) not in (None, 0, 1):
            raise ValueError(f"{name} is {renamed[name]!r:.40}: only 0 and 1, or false and true, are known")
    content = renamed.pop("content", None)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        renamed |= put_together(content)
        content = renamed.pop("content", None)
    spoken = {"role": ROLES[role.lower()]}
    if content is not None or not renamed.keys() & CALLS:
        spoken["content"] = content
        if not isinstance(content, str):
            raise ValueError(f"{message!r:.60} has no content that is a text")
    return spoken | renamed


def put_together(parts: Any) -> Any:
    """Join the parts of a message: its texts, its thoughts and its calls, by the names that templates use.

    NO_TEXT counts the parts that are none of these. In LLaMA-Factory's newer form the text of a part is its `value`.
    """
    text = ""
    thoughts = ""
    calls = []
    others = 0
    for part in parts:
        value = part.get("value")
        part_type = part.get("type") if isinstance(value, str) else ""
        part_calls = calls_of(value).get("tool_calls") if part_type == "tool_call" else None
        if part.get("text") is not None:
            text += str(part["text"])
        elif part_type == "text":
            text += value
        elif part_type == "reasoning":
            thoughts += value
        elif part_calls:
            calls += part_calls
        else:
            others += 1
    together = {"content": text, "reasoning_content": thoughts, "tool_calls": calls, NO_TEXT: others}
    message = {name: value for name, value in together.items() if value}
    return message if calls else {"content": text, **message}


def calls_of(text: Any) -> Any:
    """Return the calls in a text of ShareGPT's as templates use them. Empty: the text is no call, and stays."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        return {}
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return {}
    return {"content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}


# ---- the table ----


class Format(NamedTuple):
    """A kind of rows.

    Attributes:
        required: the columns that a row must have.
        beside: the columns that it may have.
        read: a function that makes a conversation of a row, or returns the reason why the row is left out.
        arguments: what the function takes besides the row.
        title: the name that people use; empty for a kind that TRL knows.
    """

    required: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    title: str = ""

    def present(self, names: Iterable[str]) -> list[str]:
        """Return the columns of this kind that are among these names."""
        return [name for name in (*self.required, *self.beside) if name in names]

    def sentence(self, names: Iterable[str]) -> str:
        """Return a remark: which of these columns are read as a question, and which one counts."""
        if self.read is preference:
            return f"read as {self.title}: the chosen answers count"
        question_column, answer_column = self.arguments
        asking = [question_column, *(name for name in BESIDE if name != question_column and name in names)]
        return f"read as {self.title}: what {answer_column} says counts, after {' and '.join(asking)}"


LABELS = ("label", "kto_tag")  # columns that may say that an answer is bad
TOOLS = ("tools", "functions")
# Columns that belong to a conversation besides its messages.
AROUND = ("system", "system_prompt", *TOOLS)


def chat_format(column: str) -> Format:
    """Return the kind whose rows have messages in this column."""
    return Format((column,), (*AROUND, *LABELS), chat, (column,))


def pair_format(question_column: str, answer_column: str, title: str = "the two columns named") -> Format:
    """Return the kind whose rows have two columns of these names: texts that are joined, or messages."""
    columns = (question_column, answer_column)
    return Format(columns, (*TOOLS, *LABELS), exchange, columns, title)


def _question_format(question_column: str, answer_column: str) -> Format:
    columns = (question_column, answer_column)
    return Format(columns, (*_beside(question_column), *LABELS), instruction, columns, "questions and answers")


def _preference_format(question_column: str) -> Format:
    columns = (question_column, "chosen", "rejected")
    return Format(columns, _beside(question_column), preference, columns[:1], "preferences")


def _choice_format(*columns: str) -> Format:
    return Format(columns, TOOLS, preference, ("", *columns), "preferences without a prompt")


def _beside(question_column: str) -> tuple[str, ...]:
    return (*(name for name in BESIDE if name != question_column), *AROUND)


TEXT = Format(("text",), (), str)  # every token counts
FORMATS = (
    _preference_format("conversations"),
    *map(chat_format, CHATS),
    pair_format("prompt", "completion", title=""),
    TEXT,
    *map(_preference_format, ASKING),
    _choice_format("chosen", "rejected"),
    _choice_format("chosen_messages", "rejected_messages"),  # LLaMA-Factory's newer form
    *starmap(_question_format, product(ASKING, ANSWERING)),
)
# Kinds of rows that are recognised and cannot be learned from, each with the reason and a cure.
LOOSE = (
    "each row is one message, and none says to which conversation it belongs. Write a conversation a row: "
    '{"messages": [{"role": "user", "content": "…"}, …]}, or name a column that holds all of the text'
)
UNUSABLE = {
    ("from", "value"): LOOSE,
    ("role", "content"): LOOSE,
    ("role", "text"): LOOSE,
    ("input_ids",): "its rows are token numbers of some tokenizer. Give the texts that they were made of",
    ("prompt",): "it has prompts without answers, as for reinforcement learning: there is nothing to learn. Add a "
    "column completion",
}


def recognise(names: Iterable[str]) -> Format | None:
    """Return the first kind of the table whose columns are among these names.

    None: there is no such kind, or a row has two questions or two answers, so that it is not clear which one is meant.
    """
    columns = set(names)
    questions = columns.intersection(ASKING) - {"input"}
    is_unclear = len(questions) > 1 or len(columns.intersection(ANSWERING)) > 1
    for form in FORMATS:
        if columns.issuperset(form.required):
            return None if is_unclear and form.read is instruction else form
    return None


def is_chat(value: Any) -> bool:
    """Whether a value of a column is a list of messages, or a text that holds one."""
    messages = as_list(value)
    names: set[Any] = set()
    for message in messages if isinstance(messages, list) else []:
        if not isinstance(message, dict):
            return False
        names |= {NAMES.get(name, name) for name in message}
    return {"role", "content"} <= names or {"role", "tool_calls"} <= names


def roles_in(row: dict[str, Any]) -> Iterator[str]:
    """Yield the role of each message in a row, by the file's own names."""
    for value in row.values():
        if is_chat(value):
            for message in as_list(value):
                yield str(message.get("role", message.get("from")))


# ---- remarks on what is not learned ----


def tally_remarks(tally: Counter[str], written: Counter[str], row: Any) -> None:
    """Count the parts of a conversation that are not learned, though they look as if they were.

    Args:
        tally: counts them, by a phrase for a remark.
        written: counts the entries of messages that a template may leave out, and the tools.
    """
    written["tools"] += bool(row.get("tools"))
    if isinstance(row.get("completion"), str):
        tally["answers are empty"] += not row["completion"].strip()
        tally["completions follow their prompt without a space: they are joined as they are"] += is_run_on(row)
        return
    messages = row.get("messages") or [*row["prompt"], *row["completion"]]
    answers = [message for message in messages if message["role"] == "assistant"]
    tally["conversations have no answer, so that nothing of them counts"] += not answers
    for message in messages:
        tally["parts of messages are no texts and left out"] += message.get(NO_TEXT, 0)
        written.update(message.keys() - {"role", "content", NO_TEXT, *COUNTED})
    for message in answers:
        tally["answers are not to be counted (weight 0, train or loss false)"] += not is_counted(message)
        tally["answers are empty"] += not ((message.get("content") or "").strip() or message.get("tool_calls"))


def is_run_on(row: Any) -> bool:
    """Whether the completion begins with a letter directly after the prompt's last letter or punctuation mark."""
    last = row["prompt"][-1:]
    return row["completion"][:1].isalnum() and (last.isalnum() or last in (".", "?", "!", ":", ","))


def is_counted(message: Any) -> bool:
    """Whether an assistant's message is to be learned."""
    return all(message.get(name) in (None, 1) for name in COUNTED)
