"""A text of the user's: its files and their rows. Every error names the place, a file and a line or row, and a cure."""

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.hub import ADDRESS
from workbench.texts import formats
from workbench.texts.encodings import check_bytes
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
# A header's field that is a number, a long text or a sentence: it looks as if the first row were taken for the header.
LOOKS_LIKE_DATA = re.compile(r"\s*[-+]?\d+([.,]\d+)?\s*|(?=.*\s).{50,}|.*[.?!]\s*|(\S+\s+){3,}.*", re.DOTALL)
FIRST_ROWS = 20  # rows in which the first value of each column is looked for
BLANK = "blank documents"


class LeftOut(str):
    """A reason why a document is not read, in place of its text."""


@dataclass(frozen=True)
class TextSource:
    """A file, a folder of files, or the files of a data set.

    Attributes:
        name: the name that was given, options included.
        column: the column to read, if the rows are texts.
        encoding: the encoding of the files.
        loss: empty for texts. For conversations, what counts: "answers" or "all".
        form: the kind of conversations, which makes a line of JSON of a row; None for texts.
        downloaded: the Arrow files of a data set that `datasets.load_dataset` loaded with `load_arguments`.
        remarks: sentences about what is read and what not, as far as that is known before the rows are read.
    """

    name: str
    path: Path
    column: str = "text"
    encoding: str = "utf-8-sig"
    loss: str = ""
    form: Format | None = None
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
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, if a file has them."""
        return (*self.form.required, *self.form.beside) if self.form else (self.column,)

    def present_columns(self) -> list[str]:
        """Return the columns that are read and that the first file has."""
        return self.form.present(self.first_values()) if self.form else [self.column]

    def first_values(self) -> dict[str, Any]:
        """Return the columns of the first file, each with its first value that is not empty, if the first rows have
        one."""
        values: dict[str, Any] = {}
        path = self.files()[0]
        if kind_of(path) in PLAIN:
            return values
        with suppress(Exception):  # reading the file reports its faults later
            for _, row in islice(rows_of_file(path, self.encoding), FIRST_ROWS):
                for name, value in row.items():
                    if values.get(name) in (None, "", []):
                        values[name] = value
        return values

    def place_of(self, text: str) -> str:
        """Return the first place, a file and a line or row, where a text stands."""
        for place, document in self.rows():
            if document == text:
                return place
        return self.name

    def files(self) -> list[Path]:
        """Return the files to read: the path itself, what was downloaded, or the files of KINDS in a folder.

        Hidden files are left out. Beside files of other kinds, a .json is taken for their description; beside a
        training split, other splits are left out.
        """
        if not self.is_folder:
            return list(self.downloaded or [self.path])
        files = [path for path in visible_files(self.path) if kind_of(path) in KINDS]
        # If all files are .json, they are the text itself.
        files = [path for path in files if kind_of(path) != ".json"] or files
        return training_files(files, self.path)

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
    try:
        if ending not in TABLES and not check_bytes(path, source.encoding, CHUNK) and ending in PLAIN:
            yield str(path), LeftOut(BLANK)
        elif ending in PLAIN:
            for piece in pieces_of(path, source.encoding, CHUNK):
                yield str(path), _check_text(str(path), piece)
        else:
            most = most_unpacked(path)
            characters = 0
            for number, row in rows_of_file(path, source.encoding, source.columns):
                place = f"{path}, {unit_of(path)} {number}"
                text = _check_text(place, _text_of(row, place, source))
                characters += len(text)
                # A table names a text once that it has in many rows.
                if characters > most and path.is_file():
                    raise TooMuchPackedError(path)
                yield place, text
    except ConfigurationError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise _reading_error(path, error) from None
    if ending in SEPARATORS and not number:
        raise refusal(f"{path} is empty: it has no rows below a header. Give a file with a header and rows.")


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
    for name in source.form.required if source.form else source.columns:
        if name not in row:
            raise _missing_column_error(place, name, row, source)
    if source.form:
        try:
            conversation = source.form.read(row, *source.form.arguments)
        except formats.UnknownRoleError as error:
            raise _unknown_role_error(place, source, str(error)) from None
        except ValueError as error:
            raise refusal(f'{place}: {error}. A message is {{"role": "user", "content": "…"}}.') from None
        if isinstance(conversation, str):
            return LeftOut(conversation)
        return json.dumps(conversation, ensure_ascii=False, separators=(",", ":"), default=str)
    text = row[source.column]
    if text is None:
        return LeftOut(formats.NULL)
    if not isinstance(text, str):
        raise refusal(f"{place}: {source.column!r} holds a {type(text).__name__}, not a text. {_cure_of(text)}")
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


def _missing_column_error(place: str, missing: str, row: dict[str, Any], source: TextSource) -> ConfigurationError:
    """Make the error about a row without a column, with the likeliest cure."""
    columns = [column[:80] for column in row]
    ending = kind_of(source.files()[0])
    # All rows of a table lack the column, so its number is left out; a row of JSON may be the only one.
    where = place if ending in OBJECTS else place.rpartition(", ")[0]
    problem = f"{where} has no column {missing!r}; it has {', '.join(columns[:20])}."
    if ending in SEPARATORS and any(map(LOOKS_LIKE_DATA.fullmatch, columns)):
        return refusal(
            f"{problem} These look like a row: is there no header? Write a line with the columns' "
            f"names above it, such as text{',…' * min(len(columns) - 1, 9)}"
        )
    if ending in SEPARATORS and not any(map(str.isascii, columns)):
        problem += " If these are a row, write the columns' names above it."
    if re.search(rf"[:=]{re.escape(missing)}(,|\Z)", source.name):
        return refusal(f"{problem} Name one of these.")
    if source.form:
        return refusal(f"{problem} The rows before it have one: complete it, or take it out.")
    options = split_name(source.name)[1] or (source.downloaded and split_address(source.name)[1])
    name = f"{source.name}{',' if options else ':'}"
    if not any(isinstance(value, str) for value in row.values()):
        return refusal(f"{problem} None holds a text. Write rows with a text, a prompt and a completion, or messages.")
    if len(row) == 1:
        return refusal(f"{problem} Name one: {name}column={columns[0]}")
    return refusal(
        f"{problem} Name one, if it holds all of the text: {name}column=COLUMN. If a column asks "
        f"and another answers, name both: {name}prompt=COLUMN,completion=COLUMN"
    )


def _cure_of(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return "It is a list of texts: join them into one first, for example with a blank line between."
    if isinstance(value, list) and all(isinstance(part, int) for part in value):
        return "It is a list of numbers, perhaps of tokens: give the texts that they were made of."
    return "Choose another column, or for conversations name it messages."


def _unknown_role_error(place: str, source: TextSource, role: str) -> ConfigurationError:
    """Make the error about an unknown role. It lists all roles of the text with the number of their messages."""
    counts = Counter[str]()
    for path in source.files():
        for _, row in rows_of_file(path, source.encoding, source.columns):
            counts.update(formats.roles_in(row))
    shown = [f"{name!r:.40} {count:,} times" for name, count in counts.most_common(12)]
    return refusal(
        f"{place}: the role {role!r:.40} is not known, and it would not be learned. The roles of "
        f"the text: {', '.join(shown)}. Rename it: system, user, assistant or tool."
    )
