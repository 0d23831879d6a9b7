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
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, NotRequired

from annotated_types import MinLen
from typing_extensions import TypedDict  # pydantic wants this one, up to Python 3.11

from workbench.base.settings import checker

NAMES = {"from": "role", "value": "content", "text": "content"}  # of a message, as other programs call them
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
COUNTED = ("weight", "train", "loss")  # of an assistant's message: 0 or false where it is not to be learned
BESIDE = ("input", "context")  # what stands beside a question in a column of its own
OURS = ("parts_without_text", "role_in_the_file")  # what `as_message` adds, for the remarks
NULL = "null texts"


class UnknownRoleError(ValueError):
    """A message is said by nobody that is known."""


class Message(TypedDict):
    """What someone says, and more; the content is null where the assistant calls a tool."""

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    role: str
    content: str | None


Messages = Annotated[list[Message], MinLen(1)]


class Conversation(TypedDict):
    """Of these messages the assistant's turns count."""

    messages: Messages
    tools: NotRequired[list[Any]]


class Texts(TypedDict):
    """Of these two the completion counts."""

    prompt: str
    completion: str


class Exchange(TypedDict):
    """Messages, and those that answer them, which count."""

    prompt: Messages
    completion: Messages
    tools: NotRequired[list[Any]]


# ---- a row as a conversation: each function gives a dictionary, or says why the row is left out ----


def chat(row: Any, column: str) -> Any:
    """The messages of a column, after the system's and with the tools that stand beside them."""
    messages = as_list(row.get(column))
    if messages is None:
        return "null texts"
    if isinstance(messages, list) and not messages:
        return "conversations without messages"
    if is_disliked(row):
        return "rows whose label is false"
    if isinstance(messages, list):
        messages = list(map(as_message, messages))
        has_system = isinstance(messages[0], dict) and messages[0].get("role") == "system"  # which goes over the column
        messages = messages if has_system else [*before(row), *messages]
    return {"messages": messages, **tools_of(row)}


def exchange(row: Any, prompt: str = "prompt", completion: str = "completion") -> Any:
    """Two texts, or messages and those that answer them."""
    if row.get(prompt) is None or row.get(completion) is None:
        return "null texts"
    if is_disliked(row):
        return "rows whose label is false"
    parts = {"prompt": row[prompt], "completion": row[completion]}
    if isinstance(row[prompt], str) and isinstance(row[completion], str):
        return parts
    if isinstance(row[prompt], list) and isinstance(row[completion], list):
        parts = {name: [as_message(message) for message in messages] for name, messages in parts.items()}
    return {**parts, **tools_of(row)}


def instruction(row: Any, question_column: str, answer_column: str) -> Any:
    """A question, with what stands beside it after a blank line, and its answer."""
    if row.get(question_column) is None or row.get(answer_column) is None:
        return "null texts"
    if is_disliked(row):
        return "rows whose label is false"
    return {
        "messages": [*before(row), question(row, question_column), {"role": "assistant", "content": row[answer_column]}]
    }


def preference(row: Any, question_column: str, chosen: str = "chosen", rejected: str = "rejected") -> Any:
    """A question and the chosen of two answers; without a question, what the two have in common is one."""
    answer = row.get(chosen)
    if answer is None or (question_column and row.get(question_column) is None):
        return "null texts"
    if not question_column:
        prompt = common_beginning(answer, row.get(rejected) or "")
        row = {"prompt": prompt, "completion": answer[len(prompt) :]}
        return exchange(row) if row["completion"] else "pairs of equal answers"
    prompt = row[question_column]
    if question_column == "prompt" and isinstance(prompt, str) and isinstance(answer, str):
        return {"prompt": prompt, "completion": answer}
    if isinstance(prompt, dict):
        row = {**prompt, **row}
        prompt = prompt.get("messages")
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    answers = [as_message(message) for message in (answer if isinstance(answer, list) else [answer])]
    if isinstance(prompt, list):
        prompt = [as_message(message) for message in prompt]
    elif len(answers) > 1:  # the question is said again before the answer
        prompt = answers[:-1]
        answers = answers[-1:]
    else:
        prompt = [question(row, question_column)]
    return {"prompt": [*before(row), *prompt], "completion": answers, **tools_of(row)}


def common_beginning(first: Any, second: Any) -> Any:
    """What two texts, or two lists of messages, begin with; of texts without the last space, as in TRL."""
    length = 0
    for one_part, other_part in zip(first, second, strict=False):
        if one_part != other_part:
            break
        length += 1
    if first[:length] and first[length - 1] == " ":
        length -= 1
    return first[:length]


def question(row: Any, question_column: str) -> Any:
    """The user's message, with the columns that stand beside the question."""
    parts = [row[question_column], *(row[name] for name in BESIDE if name != question_column and row.get(name))]
    text = "\n\n".join(parts) if all(isinstance(part, str) for part in parts) else row[question_column]
    return {"role": "user", "content": text}


def before(row: Any) -> Any:
    """The messages of the system and of earlier questions and answers that have columns of their own."""
    system = row.get("system") or row.get("system_prompt")
    messages = [{"role": "system", "content": system}] if system else []
    for earlier_question, answer in row.get("history") or []:
        messages += [{"role": "user", "content": earlier_question}, {"role": "assistant", "content": answer}]
    return messages


def tools_of(row: Any) -> Any:
    """The tools that a conversation may use, as `{"tools": […]}`, or nothing."""
    tools = as_list(row.get("tools") or row.get("functions"))
    return {"tools": tools} if tools else {}


def is_disliked(row: Any) -> bool:
    """Whether KTO's label says that the answer is a bad one. Names and numbers of classes are no such labels."""
    label = row.get("label", row.get("kto_tag"))
    return is_like_or_dislike(label) and str(label).lower() == "false"


def is_like_or_dislike(label: Any) -> bool:
    """Whether a label is KTO's: true or false, in a table perhaps as a text."""
    return str(label).lower() in ("true", "false")


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


def as_message(message: Any) -> Any:
    """What someone says, by the names that templates know. Raises UnknownRoleError; ValueError for an odd weight."""
    if not isinstance(message, dict):
        return message
    renamed = {}
    for name, value in message.items():
        plain = NAMES.get(name, name)
        renamed[name if plain in message else plain] = value
    role = renamed.get("role")
    if isinstance(role, str):
        if role.lower() not in ROLES:
            raise UnknownRoleError(role)
        renamed["role"] = ROLES[role.lower()]
        if role.lower() not in (renamed["role"], "human", "gpt"):
            renamed["role_in_the_file"] = role
        if role == "function_call":
            renamed |= calls_of(renamed.get("content"))
    for name in COUNTED:
        if renamed.get(name) not in (None, 0, 1):
            raise ValueError(f"{name} is {renamed[name]!r:.40}: only 0 and 1, or false and true, are known")
    if renamed.get("tool_calls") or renamed.get("function_call"):
        renamed.setdefault("content", None)
    parts = renamed.get("content")
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        renamed["content"] = "".join(str(part.get("text") or "") for part in parts)
        others = [part for part in parts if part.get("text") is None]
        if others:
            renamed["parts_without_text"] = len(others)
    return renamed


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
        columns: those that it has, with commas; a ? follows one that may be missing.
        read: makes a conversation of a row and the `arguments`, or says why the row is left out.
        title: what people call it; empty for those that TRL knows.
    """

    columns: str
    read: Callable[..., Any]
    arguments: tuple[str, ...] = ()
    title: str = ""

    @property
    def required(self) -> list[str]:
        """The columns that it must have."""
        return [name for name in self.columns.split(",") if not name.endswith("?")]

    def present(self, names: Iterable[str]) -> list[str]:
        """Its columns among these."""
        return [name for name in self.columns.replace("?", "").split(",") if name in names]

    def sentence(self, names: Iterable[str]) -> str:
        """What of these columns asks, and what counts; empty for the kinds that need no words."""
        if not self.title:
            return ""
        if self.read is preference:
            return f"read as {self.title}: the chosen answers count"
        question_column, answer_column = self.arguments
        asking = [question_column, *(name for name in BESIDE if name != question_column and name in names)]
        return f"read as {self.title}: what {answer_column} says counts, after {' and '.join(asking)}"


def chat_format(column: str) -> Format:
    """That of messages in a column of any name."""
    return Format(f"{column},system?,tools?,functions?,label?,kto_tag?", chat, (column,))


def asked_and_answered(question_column: str, answer_column: str) -> Format:
    """That of two columns of any names: texts that are joined, or messages."""
    columns = f"{question_column},{answer_column},label?,kto_tag?"
    return Format(columns, exchange, (question_column, answer_column), "the two columns named")


def _asked(question_column: str, answer_column: str, title: str) -> Format:
    beside = [f"{name}?" for name in BESIDE if name != question_column]
    columns = [question_column, *beside, answer_column, "system?", "system_prompt?", "history?", "label?", "kto_tag?"]
    return Format(",".join(columns), instruction, (question_column, answer_column), title)


def _preferred(columns: str, *arguments: str, title: str = "preferences") -> Format:
    return Format(columns, preference, arguments, title)


QUESTIONS = "questions and answers"
FORMATS = (
    _preferred("conversations,chosen,rejected,system?,tools?", "conversations"),
    chat_format("messages"),
    chat_format("conversations"),
    chat_format("conversation"),
    chat_format("dialog"),
    Format("prompt,completion,label?,kto_tag?,tools?", exchange),
    Format("text", str),  # what is all of the text counts
    _preferred("prompt,chosen,rejected,system?,tools?", "prompt"),
    _preferred("instruction,input?,chosen,rejected,system?,history?", "instruction"),
    _preferred("question,context?,chosen,rejected,system?", "question"),
    _preferred("input,preferred_output,non_preferred_output", "input", "preferred_output"),
    _preferred("chosen,rejected", "", title="preferences without a prompt"),
    _asked("instruction", "output", "alpaca"),
    _asked("instruction", "response", "dolly"),
    _asked("instruction", "completion", QUESTIONS),
    _asked("question", "answer", QUESTIONS),
    _asked("question", "response", QUESTIONS),
    _asked("query", "response", QUESTIONS),
    _asked("query", "answer", QUESTIONS),
    _asked("prompt", "response", "prompts and responses"),
    _asked("prompt", "answer", "prompts and answers"),
    _asked("problem", "solution", "problems and solutions"),
    _asked("input", "output", "inputs and outputs"),
    _asked("user", "assistant", QUESTIONS),
)
TEXT = next((row for row in FORMATS if row.columns == "text"), FORMATS[0])
# what is known and cannot be learned from
LOOSE = (
    "each row is one message, and none says to which conversation it belongs. Write a conversation a row: "
    '{"messages": [{"role": "user", "content": "…"}, …]}'
)
UNUSABLE = {
    "from,value": LOOSE,
    "role,content": LOOSE,
    "input_ids": "its rows are token numbers of some tokenizer. Give the texts that they were made of",
    "prompt": "it has prompts without answers, as for reinforcement learning: there is nothing to learn. Add a column "
    "completion",
}


def recognised(names: Iterable[str]) -> Format | None:
    """The first of the table whose columns are among these names. None if there is none, or if a row has two answers
    under names that differ, of which nobody can tell the one that counts.
    """
    columns = set(names)
    fitting = [row for row in FORMATS if columns.issuperset(row.required)]
    answers = {row.arguments[1] for row in fitting if row.read is instruction}
    if fitting and fitting[0].read is instruction and len(answers) > 1:
        return None
    return fitting[0] if fitting else None


def is_chat(value: Any) -> bool:
    """Whether a value of a column is a list of messages, or a text that holds one."""
    messages = as_list(value)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return False
    names = {NAMES.get(name, name) for message in messages for name in message}
    return {"role", "content"} <= names or {"role", "tool_calls"} <= names


def conversation_of(kind: Format, values: Any) -> Any:
    """What the row of a kind is: a checked conversation, or the reason why it is left out.

    Args:
        values: of its columns, of several a tuple.

    Raises:
        UnknownRoleError, or another ValueError: it is none.
    """
    conversation = kind.read(row_of(kind, values), *kind.arguments)
    if isinstance(conversation, str):
        return conversation
    check = checker(_shape(conversation))
    try:
        return check.dump_python(check.validate_python(conversation), exclude_none=True, mode="json")
    except ValueError as error:
        fault = error.errors()[0] if hasattr(error, "errors") else {"loc": [], "msg": str(error)}  # pydantic's
        raise ValueError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ")) from None


def row_of(kind: Format, values: Any) -> dict[str, Any]:
    """The values of a kind's columns, of several a tuple, by name; without nulls."""
    names = kind.columns.replace("?", "").split(",")
    row = dict(zip(names, values if len(names) > 1 else [values], strict=True))
    return {name: value for name, value in row.items() if value is not None}


def _shape(row: dict[str, Any]) -> type:
    """Which of the three kinds of conversations it is meant to be."""
    if "messages" in row:
        return Conversation
    if isinstance(row["prompt"], str) or isinstance(row["completion"], str):
        return Texts
    return Exchange


def roles_in(values: Any) -> Iterator[str]:
    """Who says something in a row, as the file calls them."""
    for value in values if isinstance(values, tuple) else (values,):
        messages = as_list(value)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
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
        tally["parts of messages are no texts and left out"] += message.get("parts_without_text", 0)
        if "role_in_the_file" in message:
            tally[f"messages of {message['role_in_the_file']!r:.40} are read as messages of {message['role']}"] += 1
        written.update(message.keys() - {"role", "content", *OURS, *COUNTED})
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
