"""Files become rows. These functions use nothing of the other files, and an exported script has those that it needs.

`datasets` reads what it saved itself and what the hub has. Its loaders of text, JSON, CSV and Parquet (5.2) are not
used for files, because each changes texts in silence:

- Text: a lone carriage return becomes a line end, and a long line is held in memory.
- JSON: texts that look like dates become dates, a missing key becomes a null, the message about a broken line has no
  number, and UTF-16 is cut inside a character.
- CSV (pandas): a short row is filled up; a row that is too long shifts the columns or, if one column is asked for, goes
  unnoticed; a stray quote disappears.

All of them take a path for a pattern (`a[1].parquet` is not found), and write a lock file to the Hugging Face cache
even with `streaming=True`.
"""

import csv
import gzip
import io
import json
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.texts.formats import is_chat, recognise

HELD_WHOLE = 1 << 28  # 268 million characters: the longest line of JSON, or file that is one piece of JSON
UNPACKED_TIMES = 100  # the most bytes of a packed file, for each of its own
UNPACKED_AT_LEAST = 1 << 24  # the most bytes of a small packed file
PLAIN = (".txt", ".md", "")
OBJECTS = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHER_SEPARATORS = ",;\t|"
TABLES = (".parquet", "saved", ".arrow", ".feather")
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, *TABLES)
BY_COLUMNS = "read by columns"  # a remark
SHAPE = 'Each must be one whole object: {"text": "…"}'


def kind_of(path: Path) -> str:
    """Return the ending in small letters, without .gz; for a folder "saved": a `datasets.Dataset` was saved there."""
    if path.is_dir():
        return "saved"
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


def open_file(path: Path, encoding: str | None = None) -> Any:
    """Open a file for reading: bytes, or text if an encoding is given. A .gz is unpacked as it is read."""
    if path.suffix.lower() == ".gz":
        content = io.BufferedReader(Unpacked(path), 1 << 16)
        return content if encoding is None else io.TextIOWrapper(content, encoding, newline="\n")
    return path.open("rb") if encoding is None else path.open(encoding=encoding, newline="\n")


class Unpacked(io.RawIOBase):
    """The content of a .gz. Raises TooMuchPackedError beyond `most_unpacked` bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = gzip.open(path)  # noqa: SIM115  # `close` closes it
        self.left = most_unpacked(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.file.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            raise TooMuchPackedError(self.path)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.file.close()
        super().close()


def most_unpacked(path: Path) -> int:
    """Return the most bytes that a packed file may hold."""
    return max(UNPACKED_AT_LEAST, UNPACKED_TIMES * path.stat().st_size)


class TooMuchPackedError(ValueError):
    """A packed file holds more than a text can be packed into so few bytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} holds more than {UNPACKED_TIMES} times its own {path.stat().st_size:,} bytes, and a text packs to "
            "a third or a tenth. Unpack it and look at it first."
        )


def pieces_of(path: Path, encoding: str, size: int) -> "Iterator[str]":
    """Yield a plain text in pieces of whole lines, each of about `size` characters. Line ends stay as they are."""
    with open_file(path, encoding) as file:
        while piece := "".join(file.readlines(size)):
            yield piece


def rows_of_file(path: Path, encoding: str, names: "Collection[str]" = ()) -> "Iterator[tuple[int, Any]]":
    """Return the rows of a file that is no plain text, each with the number of the line or row where it ends.

    A null is None.

    Args:
        names: columns. A table is read in these columns alone; empty: in all.

    Raises:
        ValueError: a line or row cannot be read.
    """
    if kind_of(path) in OBJECTS:
        return json_rows(path, encoding)
    if kind_of(path) in SEPARATORS:
        return csv_rows(path, encoding)
    return enumerate(table_rows(path, names), 1)


def unit_of(path: Path) -> str:
    """Name what messages count in a file: rows or lines."""
    return "row" if kind_of(path) in (".json", *TABLES) else "line"


# ---- JSON ----


def json_rows(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """Yield the objects of a JSON file, each with the number of its line or row. A list of messages becomes a row."""
    rows, _ = json_values(path, encoding)
    for number, row in rows:
        if is_chat(row):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {unit_of(path)} {number} is a {type(row).__name__}, not an object. {SHAPE}")
        yield number, row


def json_values(path: Path, encoding: str) -> "tuple[Iterator[tuple[int, Any]], list[str]]":
    """Return the values of a JSON file, each with the number of its line or row, and remarks on an unusual form."""
    if is_of_lines(path, encoding):
        return json_lines(path, encoding), ["read as JSON lines"] if kind_of(path) == ".json" else []
    with open_file(path, encoding) as file:
        text = file.read(HELD_WHOLE + 1)
    if len(text) > HELD_WHOLE:
        raise ValueError(
            f"{path} is one piece of JSON of more than {HELD_WHOLE:,} characters. Write it as "
            ".jsonl, a row in each line."
        )
    try:
        rows, notes = rows_in(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON of rows ({error}). It must be one list of objects: [{{...}}, …]; pandas writes it so "
            'with orient="records".'
        ) from None
    if kind_of(path) == ".jsonl":
        notes = ["read as one piece of JSON", *notes]
    return enumerate(rows, 1), notes


def lines_of(file: Any) -> "Iterator[str]":
    """Return the lines of a file; a line of more than HELD_WHOLE characters comes in parts."""
    return iter(partial(file.readline, HELD_WHOLE), "")


def is_of_lines(path: Path, encoding: str) -> bool:
    """Whether a JSON file has an object in every line. The name does not tell: JSON lines are often named .json."""
    with open_file(path, encoding) as file:
        filled = list(islice(filter(str.strip, lines_of(file)), 2))
    first = [*filled, ""][0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return kind_of(path) == ".jsonl" and not first.lstrip().startswith("[")
    is_whole = isinstance(value, list) and not is_chat(value)
    return len(filled) == 2 or (kind_of(path) == ".jsonl" and not is_whole)


def json_lines(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """Yield the values in the lines of a file that are not blank, each with the number of its line."""
    with open_file(path, encoding) as file:
        for number, line in enumerate(lines_of(file), 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    reason = getattr(error, "msg", error)
                    raise ValueError(f"{path}, line {number} is not JSON ({reason}). {SHAPE}") from None
                yield number, value


def rows_in(data: Any) -> "tuple[list[Any], list[str]]":
    """Return the rows in a value of JSON, and remarks on an unusual form.

    The value is a list of rows, an object with one such list under a name such as `data`, a single row, or columns as
    pandas writes them.

    Raises:
        ValueError: there are no rows, or several lists of them.
    """
    if isinstance(data, list):
        return data, []
    if not isinstance(data, dict):
        twice = ": was it written as JSON twice?" if isinstance(data, str) else ""
        raise ValueError(f"it is a {type(data).__name__}{twice}")
    form = recognise(data)
    if form and all(isinstance(data[name], str) or is_chat(data[name]) for name in form.required):
        return [data], ["read as one row"]
    lists = {name: rows for name, rows in data.items() if is_list_of_rows(rows)}
    if len(lists) > 1:
        raise ValueError(f"it has several lists of rows: {', '.join(lists)[:200]}; save the one to train on alone")
    for name, rows in lists.items():
        return rows, [] if name == "data" else [f"the rows under {name!r} are read"]
    columns = list(data.values())
    first = [*columns, None][0]
    if isinstance(first, list) and all(isinstance(column, list) and len(column) == len(first) for column in columns):
        return [dict(zip(data, row, strict=True)) for row in zip(*columns, strict=True)], [BY_COLUMNS]
    if isinstance(first, dict) and all(number.isdecimal() for number in first) and is_grid(columns):
        return [{name: column[number] for name, column in data.items()} for number in first], [BY_COLUMNS]
    raise ValueError("it is a dict")


def is_grid(columns: list[Any]) -> bool:
    """Whether all columns have the same row numbers, as pandas writes them."""
    return all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns)


def is_list_of_rows(values: Any) -> bool:
    is_list = isinstance(values, list) and bool(values)
    return is_list and all(isinstance(value, dict) for value in values) and not is_chat(values)


def notes_on_form(path: Path, encoding: str) -> list[str]:
    """Return remarks on the form of a file of JSON or CSV: what is unusual, and what is left out."""
    notes: list[str] = []
    if kind_of(path) in OBJECTS:
        rows, notes = json_values(path, encoding)
        _, first = next(rows, (0, None))
        if isinstance(first, list):
            notes.append("each list is a conversation")
    if kind_of(path) in SEPARATORS:
        separator, is_spaced, blank = form_of_table(path, encoding)
        if separator != SEPARATORS[kind_of(path)]:
            notes.append(f"the fields are separated by {separator!r}")
        if is_spaced:
            notes.append("spaces after a separator are left out")
        if blank:
            notes.append(f"the header stands in line {blank + 1}")
    return notes


# ---- CSV ----


def csv_rows(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """Yield the fields of each row by the header's names, with the number of the line where the row ends."""
    # The longest field, in characters of four bytes. The default is 131,072.
    csv.field_size_limit(2**26)
    header: list[str] = []
    separator, is_spaced, _ = form_of_table(path, encoding)
    with open_file(path, encoding) as file:
        rows = csv.reader(file, strict=True, delimiter=separator, skipinitialspace=is_spaced)
        line = 1  # the line where a row begins; the reader counts lines that it has finished
        try:
            for fields in rows:
                if not header:  # blank lines may come before the header
                    header = fields
                    check_header(path, header)
                elif len(fields) not in (0, len(header)):
                    raise ValueError(
                        f"{path}, line {line} has {len(fields)} fields, but the header has "
                        f"{len(header)}. Put text with a separator, a quote or a line end in it "
                        "into double quotes."
                    )
                elif fields:
                    yield rows.line_num, dict(zip(header, fields, strict=True))
                line = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {line} is not CSV ({error}). Close every double quote; double those in a text."
            ) from None


def check_header(path: Path, header: list[str]) -> None:
    """Raise ValueError for two columns of one name: a row would keep only the last of them."""
    for name in header:
        if name and header.count(name) > 1:
            raise ValueError(
                f"{path} has two columns {name!r}. Rename one of them, or write the columns' names "
                "above, if this is a row."
            )


def form_of_table(path: Path, encoding: str) -> tuple[str, bool, int]:
    """Look at the header of a table, and return three things about its form.

    They are the separator, which is that of the file's ending if the header has it, or else the most frequent one;
    whether a space and a quote follow it; and the number of blank lines before the header.
    """
    usual = SEPARATORS[kind_of(path)]
    blank = 0
    with open_file(path, encoding) as file:
        header = file.readline(1 << 16)
        while header and not header.strip():
            blank += 1
            header = file.readline(1 << 16)
    separator = usual if usual in header else max(usual + OTHER_SEPARATORS, key=header.count)
    return separator, f'{separator} "' in header, blank


# ---- tables ----


def table_rows(path: Path, names: "Collection[str]") -> "Iterator[Any]":
    """Yield the rows of a Parquet file or of a data set, in the named columns that it has, or in all if it has none."""
    data: Any
    if kind_of(path) == ".parquet":
        from pyarrow.parquet import ParquetFile

        data = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        groups = range(data.metadata.num_row_groups)
        if sum(data.metadata.row_group(group).total_byte_size for group in groups) > most_unpacked(path):
            raise TooMuchPackedError(path)
        columns = data.schema_arrow.names
    else:
        data = read_saved(path)
        columns = data.column_names
    wanted = [name for name in columns if name in names] or columns
    if kind_of(path) == ".parquet":
        batches = data.iter_batches(64, columns=wanted)
    else:
        batches = data.select_columns(wanted).with_format("arrow").iter(64)
    for batch in batches:
        yield from batch.to_pylist()


def read_saved(path: Path) -> Any:
    """Open a data set: a folder that `datasets` wrote, or an Arrow file.

    An Arrow file is a stream, as `datasets` writes it, or what pandas and Arrow call Feather.
    """
    from datasets import Dataset, load_from_disk

    if path.is_dir():
        return load_from_disk(str(path))
    with path.open("rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    if is_stream:
        return Dataset.from_file(str(path))
    from pyarrow.feather import read_table

    return Dataset(read_table(str(path), memory_map=True))
