"""A text of the user's: its files and their rows. Every error names the place, a file and a line or row, and a cure."""

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, brief, in_a_line
from workbench.base.hub import ADDRESS
from workbench.texts import formats
from workbench.texts.encodings import check_bytes, encoding_of
from workbench.texts.faults import refusal, refuse_unreadable
from workbench.texts.files import (
    OBJECTS,
    PLAIN,
    SEPARATORS,
    TABLES,
    TooMuchPackedError,
    kind_of,
    most_unpacked,
    pieces_of,
    rows_of_file,
    unit_of,
)
from workbench.texts.folders import Signature, signature_of, training_files, visible_files
from workbench.texts.formats import Format

CHUNK = 1 << 20  # bytes to check at a time, and characters to read at a time
KINDS = (".txt", ".md", *OBJECTS, *SEPARATORS, ".parquet")  # the endings of the files in a folder that are read
SAVED = ("dataset_dict.json", "state.json")  # a folder with one of these was written by `datasets`
SURROGATE = re.compile(r"[\ud800-\udfff]")
FIRST_ROWS = 20  # rows in which the first value of each column is looked for
BLANK = "blank documents"


class LeftOut(str):
    """A reason why a document is not read, in place of its text."""


@dataclass(frozen=True)
class TextSource:
    """A file, a folder of files, or the files of a data set.

    Attributes:
        name: the name that was given, options included.
        form: the format of the examples.
        arguments: the columns that stand for `form.arguments`; empty for one that is not there.
        encoding: the encoding that was named; empty for what each file states, which is UTF-8 without a mark.
        loss: empty for texts. For conversations, what counts: "answers" or "all".
        downloaded: the Arrow files of a data set that `datasets.load_dataset` loaded with `load_arguments`.
        remarks: sentences about what is read and what not, as far as that is known before the rows are read.
    """

    name: str
    path: Path
    form: Format = formats.TEXT
    arguments: tuple[str, ...] = formats.TEXT.columns
    encoding: str = ""
    loss: str = ""
    downloaded: tuple[Path, ...] = ()
    load_arguments: tuple[tuple[str, str | None], ...] = ()
    remarks: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield every row as its place and its text, or LeftOut, in the order of the files' names; line ends are `\\n`.

        A plain text comes in pieces, all with the same place. Memory holds one row, or the whole file of a .json.

        Raises:
            ConfigurationError: a file cannot be read as what it claims to be.
        """
        for path in self.files():
            yield from _rows(path, self)

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that every example must have."""
        return self.arguments[: len(self.form.columns)]

    @property
    def columns(self) -> list[str]:
        """The columns that are read, if a file has them."""
        return [name for name in (*self.arguments, *self.form.around) if name]

    def encoding_of(self, path: Path) -> str:
        """Return the encoding of one of the files; empty for a table, which has none."""
        return "" if kind_of(path) in TABLES else encoding_of(path, self.encoding)

    def first_values(self) -> dict[str, Any]:
        """Return the columns of the first file, each with its first value that is not empty, if the first rows have
        one."""
        values: dict[str, Any] = {}
        path = self.files()[0]
        if kind_of(path) in PLAIN:
            return values
        with suppress(Exception):  # reading the file reports its faults later
            for _, row in islice(rows_of_file(path, self.encoding_of(path)), FIRST_ROWS):
                for name, value in row.items():
                    if values.get(name) in (None, "", []):
                        values[name] = value
        return values

    def check_begin(self) -> None:
        """Raise ConfigurationError if the first file does not begin like a text of its kind and encoding."""
        path = self.files()[0]
        if kind_of(path) not in TABLES:
            with _explain(path):
                check_bytes(path, self.encoding_of(path), CHUNK, most=CHUNK)

    def has_column(self, column: str) -> bool:
        """Whether any example has a column. It reads them until one has."""
        for path in self.files():
            with _explain(path):
                if any(column in row for _, row in rows_of_file(path, self.encoding_of(path))):
                    return True
        return False

    def place_of(self, text: str) -> str:
        """Return the first place, a file and a line or row, where a text stands."""
        for place, document in self.rows():
            if document == text:
                return place
        return self.name

    def files(self) -> list[Path]:
        """Return the files to read: the path itself, what was downloaded, or those in a folder.

        Raises as `training_files` does.
        """
        return training_files(self.path, KINDS) if self.is_folder else list(self.downloaded or [self.path])

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of texts.

        A folder that a `datasets.Dataset` was saved to counts as a file, and so does a clone that was loaded.
        """
        is_saved = any((self.path / name).is_file() for name in SAVED)
        return self.path.is_dir() and not is_saved and not self.downloaded

    def others(self) -> list[Path]:
        """Return the files of a folder that are not read."""
        return sorted(set(visible_files(self.path)) - set(self.files())) if self.is_folder else []

    def address(self, options: str) -> str:
        """Return the name with more options."""
        has_options = split_name(self.name)[1] or (self.downloaded and split_address(self.name)[1])
        return f"{self.name}{',' if has_options else ':'}{options}"

    def signature(self) -> Signature:
        """Return names, sizes, times of change and inodes of all files. If they change, so may the text."""
        return signature_of(self.files())


def split_name(name: str) -> tuple[str, str]:
    """Return the path in a name, and the options with their colon.

    A colon may also be a part of an existing path, or of a drive.
    """
    location, colon, options = name.rpartition(":")
    if os.path.exists(os.path.expanduser(location)) and not os.path.exists(os.path.expanduser(name)):
        return location, colon + options
    return name, ""


def split_address(name: str) -> tuple[str, str]:
    """Return the name of a data set of the hub, or the address of its page, and the options with their colon."""
    start = ADDRESS.match(name)
    repository, colon, options = name[start.end() if start else 0 :].partition(":")
    return f"{start[0] if start else ''}{repository}", colon + options


# ---- rows ----


def _rows(path: Path, source: TextSource) -> Iterator[tuple[str, str]]:
    """Yield the place and the checked text of each row, or of each piece of a plain text."""
    ending = kind_of(path)
    number = 0
    with _explain(path):
        encoding = source.encoding_of(path)
        if ending not in TABLES and not check_bytes(path, encoding, CHUNK) and ending in PLAIN:
            yield str(path), LeftOut(BLANK)
        elif ending in PLAIN:
            for piece in pieces_of(path, encoding, CHUNK):
                yield str(path), _check_text(str(path), piece)
        else:
            most = most_unpacked(path)
            characters = 0
            unit = unit_of(path, encoding)
            for number, row in rows_of_file(path, encoding, source.columns):
                place = f"{path}, {unit} {number}"
                text = _check_text(place, _text_of(row, place, source))
                characters += len(text)
                # A table names a text once that it has in many rows.
                if characters > most and path.is_file():
                    raise TooMuchPackedError(path)
                yield place, text
    if ending in SEPARATORS and not number:
        raise refusal(f"{path} is empty: it has no rows below a header. Give a file with a header and rows.")


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Turn any error of the reading of a file into a ConfigurationError."""
    try:
        yield
    except ConfigurationError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise _reading_error(path, error) from None


def _reading_error(path: Path, error: Exception) -> ConfigurationError:
    """Make the error about a file whose reading failed."""
    if isinstance(error, TooMuchPackedError):
        return refusal(str(error))
    if kind_of(path) in TABLES or isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return refusal(f"{path} is empty or damaged ({in_a_line(error)}). Write or copy it again.")
    if isinstance(error, OSError):
        refuse_unreadable(error, path)
    return refusal(str(error))


def _text_of(row: dict[str, Any], place: str, source: TextSource) -> str:
    """Return the text of a row, or its conversation as one line of JSON, or LeftOut if it has nothing to learn."""
    for name in source.required:
        if name not in row:
            raise missing_column_error(source, row, f"{place} has no column {name!r}")
    if source.form.read is not None:
        try:
            conversation = source.form.read(row, *source.arguments)
        except formats.UnknownRoleError as error:
            raise _unknown_role_error(place, source, str(error)) from None
        except ValueError as error:
            raise refusal(f'{place}: {error}. A message is {{"role": "user", "content": "…"}}.') from None
        if isinstance(conversation, str):
            return LeftOut(conversation)
        return json.dumps(conversation, ensure_ascii=False, separators=(",", ":"), default=str)
    [column] = source.arguments
    text = row[column]
    if text is None:
        return LeftOut(formats.NULL)
    if not isinstance(text, str):
        raise refusal(f"{place}: {column!r} holds a {type(text).__name__}, not a text. Name a column of texts.")
    return text if text.strip() else LeftOut(BLANK)


def _check_text(place: str, text: str) -> str:
    """Refuse a text with half of a surrogate pair, and return it with plain line ends."""
    surrogate = None if text.isascii() else SURROGATE.search(text)
    if surrogate:
        raise refusal(
            f"{place}: character {surrogate.end()} is half of a surrogate pair, which no text can "
            "have. Remove it, or write the file again as UTF-8."
        )
    return text if isinstance(text, LeftOut) else text.replace("\r\n", "\n")


def missing_column_error(source: TextSource, row: dict[str, Any], problem: str) -> ConfigurationError:
    """Make the error about examples of none of the formats: their columns, and the addresses to fill in.

    Args:
        row: the columns, each with a value.
        problem: the first words of the message.
    """
    shown = [f"{name!r:.40} ({brief(value):.40})" for name, value in row.items()]
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    header = ""
    if kind_of(source.files()[0]) in SEPARATORS:
        header = " If these are a row, write a line with the columns' names above it."
    if source.arguments != formats.TEXT.columns:
        return refusal(f"{problem}. It has: {', '.join(shown[:12])}{more}.{header} Name one of these.")
    return refusal(
        f"{problem}. It has: {', '.join(shown[:12])}{more}.{header} Say what to read: {source.address('text=COLUMN')} "
        "if one column holds the whole text, or in its place: messages=COLUMN; prompt=COLUMN,completion=COLUMN, which "
        "are joined as they are; instruction=COLUMN,output=COLUMN, which the chat template writes, with input=COLUMN "
        "if a third one adds to the question."
    )


def _unknown_role_error(place: str, source: TextSource, role: str) -> ConfigurationError:
    """Make the error about an unknown role. It lists all roles of the text with the number of their messages."""
    counts = Counter[str]()
    for path in source.files():
        for _, row in rows_of_file(path, source.encoding_of(path), source.columns):
            counts.update(formats.roles_in(row, source.required))
    shown = [f"{name!r:.40} {count:,} times" for name, count in counts.most_common(12)]
    return refusal(
        f"{place}: the role {role!r:.40} is not known, and it would not be learned. The roles of "
        f"the text: {', '.join(shown)}. Rename it: system, user, assistant or tool."
    )
