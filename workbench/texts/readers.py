"""The user's own files to documents: the one place that reads text.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:body` (the column),
`reviews.csv:column=body,encoding=cp1252`; or a data set of the Hugging Face hub, in which `user/set:test` is a split
and `user/set:train[:10%]` a part of one, and so in a folder that is a clone of one. Every fault names the file, the
line or row, and a cure. How a file is read: `files`; which rows are conversations: `formats`.
"""

import codecs
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, explained, in_a_line
from workbench.base.hub import ADDRESS, address_of
from workbench.texts import formats
from workbench.texts.chat import ANSWERS, LOSSES
from workbench.texts.download import data_set_files
from workbench.texts.encodings import check_bytes
from workbench.texts.faults import refusal, refuse_unreadable
from workbench.texts.files import (
    FILES,
    OBJECTS,
    PLAIN,
    SEPARATORS,
    TABLES,
    csv_fields,
    kind_of,
    note_of,
    objects,
    opened,
    read_documents,
    saved,
    unit_of,
)
from workbench.texts.folders import (
    TRAIN,
    Signature,
    by_split,
    is_data_set,
    load_data_set,
    signature_of,
    visible_files,
)
from workbench.texts.formats import Format

# what the other rooms take from here, though it is defined elsewhere
__all__ = ["OBJECTS", "PLAIN", "SEPARATORS", "TABLES", "Signature", "kind_of", "opened", "read_documents", "refusal"]

CHUNK = 1 << 20  # bytes to check, characters to read at a time
KINDS = (".txt", ".md", *OBJECTS, *SEPARATORS, ".parquet")  # that are looked for in a folder
READ = f"{', '.join(KINDS)}, packed or not (.gz), or a folder"
SAVED = ("dataset_dict.json", "state.json")  # what tells a folder that `datasets` wrote
# the kinds of files that have no such option; a data set of the hub and a folder with splits are kinds, too
WITHOUT = {
    "column": PLAIN,
    "encoding": (*TABLES, "hub"),
    "loss": PLAIN,
    "split": FILES,
    "config": (*FILES, "splits"),
    "prompt": PLAIN,
    "completion": PLAIN,
}
PAIR = ("prompt", "completion")  # options that only go together
HUB_ID = re.compile(r"(?=[^@]{1,96}(@|\Z))[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@.+)?", re.ASCII)
SURROGATE = re.compile(r"[\ud800-\udfff]")
LOOKS_LIKE_DATA = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*|(?=.*\s).{50,}|.*[.?!]\s*|(\S+\s+){3,}.*", re.DOTALL)
FIRST_ROWS = 20  # in which a column has a value


class LeftOut(str):
    """Why a document is not read."""


@dataclass(frozen=True)
class TextSource:
    """A file, a folder of files, or the files of a data set of the hub, with the column and the encoding to read.

    `loss` is empty for texts. Of conversations it says what counts, "answers" or "all"; each is a line of JSON, which
    `kind` makes of a row. The hub was `asked` for a data set, with the arguments of `datasets.load_dataset`. `remarks`
    say what of the rows and files is read and what not, as far as that is known before they are read.
    """

    name: str
    path: Path
    column: str = "text"
    encoding: str = "utf-8-sig"
    loss: str = ""
    kind: Format | None = None
    downloaded: tuple[Path, ...] = ()
    asked: tuple[tuple[str, str | None], ...] = ()
    split: str = TRAIN
    remarks: tuple[str, ...] = ()

    def documents(self) -> Iterator[Iterable[str] | LeftOut]:
        """Every document in pieces, or why it is left out, in the order of the files' names; line ends are `\\n`.

        Nothing is held in memory but a piece of a plain text, or a row; of .json, the file.

        Raises:
            ConfigurationError: a file cannot be read as what it claims to be.
        """
        for path in self.files():
            texts = (text for _, text in _documents(path, self))
            if kind_of(path) in PLAIN:
                yield texts
            else:
                yield from (text if isinstance(text, LeftOut) else _parts(text) for text in texts)

    def rows(self) -> Iterator[tuple[str, str]]:
        """Every row, or line, as its place and its text; LeftOut where it is not read. Raises as `documents` does."""
        for path in self.files():
            yield from _documents(path, self)

    def present_columns(self) -> list[str]:
        """The columns that are read and that the first file has."""
        names = _columns(self.files()[0], self)
        return self.kind.present(names) if self.kind else [self.column]

    def place_of(self, text: str) -> str:
        """The file, and the line or row there, where a text stands first."""
        for place, document in self.rows():
            if document == text:
                return place
        return self.name

    def files(self) -> list[Path]:
        """The path itself, what was downloaded, or what a folder holds of the known kinds, hidden files left out, and
        of several splits the one that is asked for.

        Beside others, a .json is taken for a description of them.
        """
        if not self.is_folder:
            return list(self.downloaded or [self.path])
        return self.splits().get(self.split, []) or self._all_files()

    def splits(self) -> dict[str, list[Path]]:
        """The files of a folder by split; empty if their names tell no splits."""
        return by_split(self._all_files(), self.path) if self.is_folder else {}

    def _all_files(self) -> list[Path]:
        files = [path for path in visible_files(self.path) if kind_of(path) in KINDS]
        # an only .json is the text itself
        return [path for path in files if kind_of(path) != ".json"] or files

    @property
    def is_folder(self) -> bool:
        """A folder of texts; one that a `datasets.Dataset` was saved to counts as a file, a clone of a data set as what
        was loaded of it."""
        is_saved = any((self.path / name).is_file() for name in SAVED)
        return self.path.is_dir() and not is_saved and not self.downloaded

    def others(self) -> list[Path]:
        """Files of a folder that are of no kind that is read."""
        return sorted(set(visible_files(self.path)) - set(self._all_files())) if self.is_folder else []

    def signature(self) -> Signature:
        """Names, sizes, times of change and inodes of all files: another one means that the text may be another."""
        return signature_of(self.files())


def _parts(text: str) -> Iterable[str]:
    """A text in parts of CHUNK characters; none if it is blank."""
    return () if text.isspace() else (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


# ---- what a name means ----


def find_text(name: str, alternatives: str) -> TextSource:
    """What a name means. `alternatives` says what else could have been given, for the message.

    Raises:
        ConfigurationError: no such file, a kind that is not read, an unknown option or encoding, an empty folder; the
            hub has no such data set, or not for this user; rows that are known and cannot be learned from.
        UnavailableError: the hub cannot be reached, and the data set is not in the cache.
    """
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if not (location and os.path.exists(path)):
        return _of_hub(name, alternatives)
    source = TextSource(name, path)
    if source.is_folder and is_data_set(path):
        return _of_clone(source, _options(name, options, {"hub"}))
    files = source.files()
    if not files:
        endings = sorted({other.suffix or other.name for other in source.others()})
        content = f"only {', '.join(endings[:5])}" if endings else "it is empty"
        raise refusal(f"the folder {location!r} has no text in it ({content}). Put {', '.join(KINDS)} files there.")
    for file in files:
        _check_kind(file)
    splits = source.splits()
    kinds = {kind_of(file) for file in files} | ({"splits"} if splits else set())
    values = _options(name, options, kinds)
    if splits:
        source = _with_split(source, splits, values.get("split", TRAIN))
    return _with_options(source, values)


def _with_split(source: TextSource, splits: dict[str, list[Path]], split: str) -> TextSource:
    """The split of a folder, and how many files there are of others."""
    if split not in splits:
        raise refusal(f"{source.name!r} has no split {split!r}. Its files are of {', '.join(sorted(splits))}.")
    others = [f"{len(files)} of {name}" for name, files in sorted(splits.items()) if name != split]
    return replace(source, remarks=(f"the files of other splits are left out ({', '.join(others)})",))


def _of_clone(source: TextSource, values: dict[str, Any]) -> TextSource:
    """A split of a folder that is a data set of the hub."""
    config = values.pop("config", None)
    split = values.pop("split", TRAIN)
    files, rows = load_data_set(source.path, config, split)
    others = [f"{name} with {count:,}" for name, count in rows.items() if name != split.partition("[")[0]]
    remarks = [f"the rows of other splits are left out: {', '.join(others)}"] if others else []
    arguments = (("path", str(source.path)), ("name", config), ("split", split))
    loaded = replace(source, downloaded=files, asked=arguments, remarks=tuple(remarks))
    return _with_options(loaded, values)


def split_name(name: str) -> tuple[str, str]:
    """Path, and options with their colon. A colon may be part of an existing path, and of a drive."""
    location, colon, options = name.rpartition(":")
    if os.path.exists(os.path.expanduser(location)) and not os.path.exists(os.path.expanduser(name)):
        return location, colon + options
    return name, ""


def _of_hub(name: str, alternatives: str) -> TextSource:
    repository, options = name_and_options(name)
    nothing = f"there is no file {name!r:.200} (looked in {Path.cwd()}), nor an embedded text"
    is_file_name = repository.lower().endswith((*KINDS, ".gz")) and "@" not in repository
    if not ADDRESS.match(repository) and (is_file_name or not HUB_ID.fullmatch(repository)):
        raise refusal(f"{nothing}. {alternatives}")
    with explained(f"corpus: {name!r:.200} is no data set of the hub", "Write owner/name or owner/name@revision."):
        address = address_of(repository, "dataset")
    values = _options(name, options, {"hub"})
    config = values.pop("config", None)
    split = values.pop("split", "train")
    files = data_set_files(address, config, split, nothing)
    arguments = (("path", address.repository), ("name", config), ("split", split), ("revision", address.revision))
    return _with_options(TextSource(name, files[0], downloaded=files, asked=arguments), values)


def name_and_options(name: str) -> tuple[str, str]:
    """The name of a data set of the hub, or the address of its page, and the options with their colon."""
    start = ADDRESS.match(name)
    repository, colon, options = name[start.end() if start else 0 :].partition(":")
    return f"{start[0] if start else ''}{repository}", colon + options


def _options(name: str, options: str, kinds: set[str]) -> dict[str, Any]:
    """The options of a name, checked for the kinds of its files."""
    values: dict[str, Any] = {}
    for option in options[1:].split(",") if options else []:
        key, equals, value = option.partition("=")
        if not equals:
            key = "split" if kinds & {"hub", "splits"} else "column"
            value = option
        if key not in WITHOUT:
            raise refusal(f"{name!r}: there is no option {key!r}. Known: {', '.join(WITHOUT)}.")
        if key in values or not value:
            raise refusal(f"{name!r}: {key} is {'given twice' if value else 'empty'}. Give one {key}, or none.")
        if kinds <= set(WITHOUT[key]):  # there is no file that has it
            single = [other for other, without in WITHOUT.items() if not kinds <= set(without) and other not in PAIR]
            others = " and ".join(f"{other}=…" for other in single)
            raise refusal(
                f"{name!r}: {min(kinds) or 'plain text'} has no {key}, only {others} can be given. "
                f"Leave {option!r} out."
            )
        if key == "loss" and value not in LOSSES:
            raise refusal(f"{name!r}: there is no loss {value!r}. Known: {', '.join(LOSSES)}.")
        values[key] = _encoding(value) if key == "encoding" else value
    return values


def _encoding(name: str) -> str:
    try:
        "".encode(name)  # a codec may be known and be none of text, as base64
        canonical = codecs.lookup(name).name
    except (LookupError, ValueError):
        raise refusal(f"there is no encoding {name!r}. Common ones: utf-8, latin-1, cp1252, shift_jis.") from None
    return "utf-8-sig" if canonical == "utf-8" else canonical


def _with_options(source: TextSource, options: dict[str, Any]) -> TextSource:
    """Without a column, the first kind of `formats.FORMATS` is read that the first file has the columns of."""
    columns = {name: options.pop(name) for name in PAIR if name in options}
    source = replace(source, **options)
    names: list[str] = []
    with suppress(Exception):  # what is wrong with the file is said when it is read
        names = _columns(source.files()[0], source)
    if len(columns) == 1:
        raise refusal(f"{source.name!r} names {min(columns)} alone. Give both: prompt=COLUMN,completion=COLUMN.")
    if columns and "column" in options:
        raise refusal(f"{source.name!r} names a column, and a prompt and a completion. Give one of these.")
    kind: Format | None = None
    if columns:
        kind = formats.asked_and_answered(columns["prompt"], columns["completion"])
    elif "column" not in options:
        kind = _kind_of_rows(source, names)
    elif _holds_chats(source, source.column):
        kind = formats.chat_format(source.column)
    if kind:
        source = replace(source, kind=kind, column=kind.columns, loss=source.loss or ANSWERS)
    elif source.loss:
        raise refusal(f"{source.name!r} has texts, no conversations: of these all counts. Leave loss=… out.")
    return replace(source, remarks=(*source.remarks, *_about_columns(source, names, "column" in options)))


def _kind_of_rows(source: TextSource, names: list[str]) -> Format | None:
    """The kind of conversations that the rows are; None for texts. Raises ConfigurationError for rows that are known
    and of no use."""
    kind = formats.recognised(names)
    rest = list(names)
    while kind and kind.read is formats.chat and not _may_hold_chats(source, kind.arguments[0]):
        rest.remove(kind.arguments[0])  # a column of this name that holds something else
        kind = formats.recognised(rest)
    if kind is formats.TEXT and not _holds_chats(source, "text"):
        return None
    if kind and kind is not formats.TEXT:
        return kind
    chats = [name for name in names if _holds_chats(source, name)]
    if len(chats) == 1:
        return formats.chat_format(chats[0])
    for columns, reason in formats.UNUSABLE.items():
        if set(columns.split(",")) <= set(names):
            raise refusal(f"{source.name} has the columns {', '.join(names)[:300]}: {reason}.")
    return None


def _may_hold_chats(source: TextSource, column: str) -> bool:
    """Whether a column of a name that conversations have holds lists; a field of a CSV file may be any text."""
    value = _first_value(source, column)
    return isinstance(formats.as_list(value), list) or kind_of(source.files()[0]) not in SEPARATORS


def _holds_chats(source: TextSource, column: str) -> bool:
    """Whether the first value of a column is a list of messages, or a text that holds one."""
    return formats.is_chat(_first_value(source, column))


def _first_value(source: TextSource, column: str) -> Any:
    """The first value of a column that is not empty; None if the first rows have none."""
    with suppress(Exception):  # what is wrong with the file is said when it is read
        rows = read_documents(str(source.files()[0]), column, source.encoding)
        for _, value in islice(rows, FIRST_ROWS):
            if value not in (None, "", []):
                return value
    return None


def _about_columns(source: TextSource, names: list[str], is_named: bool) -> list[str]:
    """What is said of the columns: the kind that was recognised, and what is not read."""
    kind = source.kind
    remarks = []
    with suppress(Exception):
        remarks += note_of(source.files()[0], source.encoding)
    if kind and kind.title:
        remarks.append(kind.sentence(names))
    elif kind and kind.read is formats.chat and kind not in formats.FORMATS and not is_named:
        remarks.append(f"the column {kind.arguments[0]} is read, which holds messages")
    whole = formats.recognised(names)
    if is_named and not kind and whole and whole is not formats.TEXT and source.column in whole.required:
        remarks.append(
            f"the column {source.column} alone is read, of rows of {' and '.join(whole.required)}; without a column "
            "named, the whole row is"
        )
    elif kind or {"label", "labels"} & set(names):
        read = source.column.replace("?", "").split(",")
        for label in {"label", "kto_tag"} & set(names) & set(read):
            if not formats.is_like_or_dislike(_first_value(source, label)):
                read.remove(label)
        unread = [name for name in names if name not in read]
        if unread:
            remarks.append(f"not read: the columns {', '.join(map(repr, unread[:12]))}")
    return remarks


def column_of(names: Iterable[str]) -> str:
    """The columns among these that are read without one being named, with commas; `text` if no kind is recognised."""
    names = list(names)
    kind = formats.recognised(names)
    return ",".join(kind.present(names)) if kind else "text"


def _check_kind(path: Path) -> None:
    if SURROGATE.search(str(path)):
        raise refusal(f"the name {str(path)!r} is not UTF-8, so that no record can hold it. Rename it.")
    if not path.is_file() and not path.is_dir():
        what = "not a regular file" if path.exists() else "a link that leads nowhere"
        raise refusal(f"{path} is {what}. Give a file with text in it.")
    # a packed table would have to be unpacked whole
    if kind_of(path) not in FILES or (path.suffix.lower() == ".gz" and kind_of(path) in TABLES):
        raise refusal(f"{path} ends in {''.join(path.suffixes[-2:])}, which is not read. Give {READ}.")


# ---- checking ----


def _documents(path: Path, source: TextSource) -> Iterator[tuple[str, str]]:
    """The place and text of each that `read_documents` gives, checked, and with a place and a cure for every fault."""
    ending = kind_of(path)
    unit = unit_of(path)
    number = 0
    try:
        if ending not in TABLES and not check_bytes(path, source.encoding, CHUNK) and ending in PLAIN:
            return
        _check_columns(path, source)
        for number, text in read_documents(str(path), source.column, source.encoding, CHUNK):
            place = f"{path}, {unit} {number}"
            yield place, _checked(place, source, text)
    except ConfigurationError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise _fault(path, source, error) from None
    if ending in SEPARATORS and not number:
        raise refusal(f"{path} is empty: it has a header, but no rows. Give a file with rows.")


def _fault(path: Path, source: TextSource, error: Exception) -> ConfigurationError:
    """What stopped the reading."""
    if kind_of(path) == ".parquet":
        return refusal(f"{path} is not a whole Parquet file ({in_a_line(error)}). Write or copy it again.")
    if kind_of(path) in TABLES:
        return refusal(f"the data set saved in {path} is empty or damaged ({error}). Save it again.")
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return refusal(f"{path} is not a whole gzip file ({in_a_line(error)}). Copy or pack it again.")
    if isinstance(error, OSError):
        refuse_unreadable(error, path)
    if isinstance(error, KeyError):
        where, columns = error.args
        return _no_column(where, columns, source)
    return refusal(str(error))


def _check_columns(path: Path, source: TextSource) -> None:
    """Refuses a file without the column where that is known before its rows."""
    if kind_of(path) in (*OBJECTS, *PLAIN):
        return
    columns = _columns(path, source)
    if not columns and kind_of(path) in SEPARATORS:
        raise refusal(f"{path} is empty. Give a file with a header and rows.")
    # of two columns with one name a dictionary would keep the last
    for option in source.column.split(","):
        name = option.removesuffix("?")
        if name not in columns:
            if option != name:
                continue
            raise _no_column(str(path), columns, source)
        if columns.count(name) > 1:
            raise refusal(f"{path} has two columns {name!r}. Rename one of them.")


def _columns(path: Path, source: TextSource) -> list[str]:
    """The names of a table's columns; of objects, those that the first has."""
    ending = kind_of(path)
    if ending in OBJECTS:
        for _, row in objects(path, source.encoding, []):
            return list(row)
    if ending in SEPARATORS:
        for _, _, header in csv_fields(path, source.encoding):
            return header
    if ending not in TABLES:
        return []
    if ending == ".parquet":
        from pyarrow.parquet import read_schema

        return list(read_schema(path).names)
    data_set = saved(path)
    if isinstance(data_set, dict):
        first = path / next(iter(data_set), "train")
        raise refusal(f"{path} holds the splits {', '.join(data_set)}. Give one: {first}")
    return list(data_set.column_names)


def _no_column(where: str, columns: list[str], source: TextSource) -> ConfigurationError:
    shown = [column[:80] for column in columns[:20]]
    name, _ = split_name(source.name)
    option = ":"
    if source.downloaded:
        name = source.name.rpartition(":column=")[0] or source.name
        option = ",column=" if ":" in name.removeprefix(str(source.path)) else ":column="
    missing = [column for column in source.column.split(",") if not column.endswith("?") and column not in columns]
    start = f"{where} has no column {missing[0]!r}; it has {', '.join(shown)}."
    if kind_of(source.files()[0]) in SEPARATORS and any(LOOKS_LIKE_DATA.fullmatch(column) for column in columns):
        return refusal(
            f"{start} These look like a row: is there no header? Write a line with the columns' names above it, such "
            f"as text{',…' * min(len(columns) - 1, 9)}"
        )
    if len(columns) < 2:
        return refusal(f"{start} Name one: {name}{option}{shown[0] if shown else 'COLUMN'}")
    pair = f"{name}{option.removesuffix('column=')}prompt=COLUMN,completion=COLUMN"
    return refusal(
        f"{start} Name one, if it holds all of the text: {name}{option}COLUMN. If a column asks and another answers, "
        f"name both: {pair}"
    )


def _checked(place: str, source: TextSource, text: Any) -> str:
    """The text with plain line ends; LeftOut where it is not read. A conversation is a line of JSON."""
    if source.kind:
        try:
            text = line_of(source.kind, text)
        except formats.UnknownRoleError as error:
            raise _unknown_role(place, source, str(error)) from None
        except ValueError as error:
            raise refusal(f'{place}: {error}. A message is {{"role": "user", "content": "…"}}.') from None
    if text is None:
        return LeftOut(formats.NULL)
    if not isinstance(text, str):
        raise refusal(f"{place}: {source.column!r} holds a {type(text).__name__}, not a text. {_cure_of(text)}")
    surrogate = None if text.isascii() else SURROGATE.search(text)
    if surrogate:
        raise refusal(
            f"{place}: character {surrogate.end()} is half of a surrogate pair, which no text can have. Remove it, or "
            "write the file again as UTF-8."
        )
    return text if isinstance(text, LeftOut) else text.replace("\r\n", "\n")


def line_of(kind: Format, values: Any) -> str:
    """A conversation as one line of JSON; LeftOut if there is nothing to learn. Raises ValueError if it is none."""
    conversation = formats.conversation_of(kind, values)
    if isinstance(conversation, str):
        return LeftOut(conversation)
    try:
        return json.dumps(conversation, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, RecursionError) as error:
        raise ValueError(in_a_line(error)) from None


def _cure_of(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "It is a list of texts: join them into one first, for example with a blank line between."
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        return "It is a list of numbers, perhaps of tokens: give the texts that they were made of."
    return "Choose another column, or for conversations name it messages."


def _unknown_role(place: str, source: TextSource, role: str) -> ConfigurationError:
    """With all the roles of the text and how often each says something."""
    counts = Counter[str]()
    for path in source.files():
        for _, values in read_documents(str(path), source.column, source.encoding):
            counts.update(formats.roles_in(values))
    shown = ", ".join(f"{name!r:.40} {count:,} times" for name, count in counts.most_common(12))
    return refusal(
        f"{place}: the role {role!r:.40} is not known, and it would not be learned. The roles of the text: {shown}. "
        "Rename it: system, user, assistant or tool."
    )
