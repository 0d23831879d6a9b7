"""The kinds of rows that people have, known by their columns, and the conversation that each of them is.

`FORMATS` is the table: the columns, the function that reads a row, what it is called and what of it counts. The
functions know nothing of the rest; an exported script has the one that it needs.

Tokens and labels follow TRL (1.16): a prompt and its completion are joined as they are; questions and answers under any
other names become messages, which the chat template writes. Of a preference the chosen answer counts, as in TRL's SFT
on such data; where the prompt is not said, it is what the chosen and the rejected text have in common at the beginning.
The names of ShareGPT's roles are those of FastChat, LLaMA-Factory and axolotl.
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

# of a message, as other programs call them
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
CALLS = {"tool_calls", "function_call"}  # entries of a message that may have no content
# of an assistant's message: 0 or false: it is not to be learned
COUNTED = ("weight", "train", "loss", "loss_weight")
# columns that ask
ASKING = ("instruction", "question", "query", "problem", "prompt", "input", "inputs", "user", "human")
# and that answer
ANSWERING = ("output", "response", "answer", "completion", "solution", "targets", "assistant")
BESIDE = ("input", "context")  # what stands beside a question in a column of its own
CHATS = ("messages", "conversations", "conversation")
NO_TEXT = "parts_without_text"  # what `as_message` adds, for the remarks
NULL = "null texts"
DISLIKED = "rows whose label is false"


class UnknownRoleError(ValueError):
    """A message is said by nobody that is known."""


# ---- a row as a conversation: each function gives a dictionary, or says why the row is left out ----


def chat(row: Any, column: str) -> Any:
    """The messages of a column, after the system's and with the tools that stand beside them."""
    messages = as_list(row.get(column))
    if messages is None:
        return NULL
    if messages == []:
        return "conversations without messages"
    if is_disliked(row):
        return DISLIKED
    messages = messages_of(messages)
    has_system = messages[0]["role"] == "system"  # which goes over the column
    return {"messages": messages if has_system else [*system_of(row), *messages], **tools_of(row)}


def exchange(row: Any, prompt: str = "prompt", completion: str = "completion") -> Any:
    """Two texts, or messages and those that answer them."""
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
    """A question, with what stands beside it after a blank line, and its answer."""
    answer = row.get(answer_column)
    if row.get(question_column) is None or answer is None:
        return NULL
    if is_disliked(row):
        return DISLIKED
    return {"messages": [*system_of(row), question(row, question_column), answer_of(answer)], **tools_of(row)}


def preference(row: Any, question_column: str, chosen_column: str = "chosen", other: str = "rejected") -> Any:
    """A question and the chosen of two answers; without a question, what the two have in common is one."""
    chosen = row.get(chosen_column)
    prompt = row.get(question_column) if question_column else ""
    if chosen is None or prompt is None:
        return NULL
    if isinstance(chosen, str) and not question_column:
        prompt = commonprefix([chosen, row.get(other) or ""]).removesuffix(" ")  # as in TRL  # noqa: RUF071
        chosen = chosen[len(prompt) :]
        return {"prompt": prompt, "completion": chosen} if chosen else "pairs of equal answers"
    around = system_of(row) if question_column else []
    is_alone = not (around or row.get("input") or row.get("context"))
    if is_alone and question_column == "prompt" and isinstance(prompt, str) and isinstance(chosen, str):
        return {"prompt": prompt, "completion": chosen}
    answers = messages_of(chosen) if isinstance(chosen, list) else [answer_of(chosen)]
    if isinstance(prompt, list):
        before = messages_of(prompt)
    elif len(answers) > 1:  # the question is said again before the answer
        before = answers[:-1]
        answers = answers[-1:]
    elif question_column:
        before = [question(row, question_column)]
    else:
        return "answers without a question"
    return {"prompt": [*around, *before], "completion": answers, **tools_of(row)}


def answer_of(answer: Any) -> Any:
    """The assistant's message: a text, or already a message."""
    return as_message(answer if isinstance(answer, dict) else {"role": "assistant", "content": answer})


def question(row: Any, question_column: str) -> Any:
    """The user's message, with the columns that stand beside the question."""
    parts = [row[question_column], *(row[name] for name in BESIDE if name != question_column and row.get(name))]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{question_column!r}, or what stands beside it, is no text")
    return {"role": "user", "content": "\n\n".join(parts)}


def system_of(row: Any) -> Any:
    """The message of the system, if it has a column of its own."""
    system = row.get("system") or row.get("system_prompt")
    if not system:
        return []
    return [{"role": "system", "content": system}]


def tools_of(row: Any) -> Any:
    """The tools that a conversation may use, as `{"tools": […]}`, or nothing."""
    tools = as_list(row.get("tools") or row.get("functions"))
    if not tools:
        return {}
    if not isinstance(tools, list):
        raise ValueError(f"the tools are a {type(tools).__name__}, not a list")
    return {"tools": tools}


def is_disliked(row: Any) -> bool:
    """Whether KTO's label says that the answer is a bad one. Names and numbers of classes are no such labels."""
    label = row.get("label", row.get("kto_tag"))
    return str(label).lower() == "false"  # in a table perhaps a text


def as_list(value: Any) -> Any:
    """A list that a table holds as a text: JSON, or what Python or numpy print."""
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
    """A list of messages. Raises as `as_message`."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{value!r:.60} is no list of messages")
    messages = []
    for turn in value:
        messages += turn_of(turn)
    return messages


def turn_of(turn: Any) -> Any:
    """A message; or, of an object with a question and its answer, the two, after the system's. Raises as
    `as_message`."""
    if not isinstance(turn, dict) or "role" in turn or "from" in turn:
        return [as_message(turn)]
    asking = [name for name in ASKING if name in turn]
    answering = [name for name in ANSWERING if name in turn]
    if len(asking) != 1 or len(answering) != 1:
        return [as_message(turn)]
    return [*system_of(turn), question(turn, asking[0]), answer_of(turn[answering[0]])]


def as_message(message: Any) -> Any:
    """What someone says, by the names that templates know. Raises UnknownRoleError; ValueError for another fault."""
    if not isinstance(message, dict):
        raise ValueError(f"{message!r:.60} is no message")
    renamed = {}
    for name, value in message.items():
        plain = NAMES.get(name, name)
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
    """The parts of a message in one: its texts, its thoughts and calls by the names that templates know, and how many
    parts are none of these. In LLaMA-Factory's newer form what a part says is its `value`."""
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
    """ShareGPT's text of a call as the calls that templates know; nothing, so that the text stays, if it is none."""
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
    """Rows of a kind.

    Attributes:
        required, beside: columns that it must have, and that it may have.
        read: makes a conversation of a row and the `arguments`, or says why the row is left out.
        title: what people call it; empty for those that TRL knows.
    """

    required: tuple[str, ...]
    beside: tuple[str, ...]
    read: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    title: str = ""

    def present(self, names: Iterable[str]) -> list[str]:
        """Its columns among these."""
        return [name for name in (*self.required, *self.beside) if name in names]

    def sentence(self, names: Iterable[str]) -> str:
        """What of these columns asks, and what counts."""
        if self.read is preference:
            return f"read as {self.title}: the chosen answers count"
        question_column, answer_column = self.arguments
        asking = [question_column, *(name for name in BESIDE if name != question_column and name in names)]
        return f"read as {self.title}: what {answer_column} says counts, after {' and '.join(asking)}"


LABELS = ("label", "kto_tag")
TOOLS = ("tools", "functions")
AROUND = ("system", "system_prompt", *TOOLS)


def chat_format(column: str) -> Format:
    """That of messages in a column of any name."""
    return Format((column,), (*AROUND, *LABELS), chat, (column,))


def asked_and_answered(question_column: str, answer_column: str, title: str = "the two columns named") -> Format:
    """That of two columns of any names: texts that are joined, or messages."""
    columns = (question_column, answer_column)
    return Format(columns, (*TOOLS, *LABELS), exchange, columns, title)


def _asked(question_column: str, answer_column: str) -> Format:
    columns = (question_column, answer_column)
    return Format(columns, (*_beside(question_column), *LABELS), instruction, columns, "questions and answers")


def _preferred(question_column: str) -> Format:
    columns = (question_column, "chosen", "rejected")
    return Format(columns, _beside(question_column), preference, columns[:1], "preferences")


def _chosen(*columns: str) -> Format:
    return Format(columns, TOOLS, preference, ("", *columns), "preferences without a prompt")


def _beside(question_column: str) -> tuple[str, ...]:
    return (*(name for name in BESIDE if name != question_column), *AROUND)


TEXT = Format(("text",), (), str)  # all of it counts
FORMATS = (
    _preferred("conversations"),
    *map(chat_format, CHATS),
    asked_and_answered("prompt", "completion", title=""),
    TEXT,
    *map(_preferred, ASKING),
    _chosen("chosen", "rejected"),
    _chosen("chosen_messages", "rejected_messages"),  # LLaMA-Factory's newer form
    *starmap(_asked, product(ASKING, ANSWERING)),
)
# what is known and cannot be learned from
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


def recognised(names: Iterable[str]) -> Format | None:
    """The first of the table whose columns are among these names. None if there is none, or if a row has two questions
    or two answers, of which nobody can tell the one that is meant.
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
    """Who says something in a row, as the file calls them."""
    for value in row.values():
        if is_chat(value):
            for message in as_list(value):
                yield str(message.get("role", message.get("from")))


# ---- what is not learned from, for the remarks ----


def notice(tally: Counter[str], written: Counter[str], row: Any) -> None:
    """Count what of a conversation does not count, though it looks as if it did.

    Args:
        tally: by what it is.
        written: names of a message's entries that a template may leave out, and of the tools.
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
    """Whether a letter follows the prompt's last letter, or the point or question mark at its end."""
    last = row["prompt"][-1:]
    return row["completion"][:1].isalnum() and (last.isalnum() or last in (".", "?", "!", ":", ","))


def is_counted(message: Any) -> bool:
    """Whether an assistant's message is to be learned."""
    return all(message.get(name) in (None, 1) for name in COUNTED)
