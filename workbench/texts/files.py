"""Files to rows: these functions know nothing of the rest, and an exported script has those that it needs.

`datasets` reads what it saved itself and what the hub has; its loaders of text, JSON, CSV and Parquet (5.2) are not
used for files, because each changes texts without a word. Text: a lone carriage return becomes a line end, a long line
is held whole. JSON: texts that look like dates become dates, a missing key becomes a null, a broken line has no number,
UTF-16 is cut inside a character. CSV (pandas): a short row is filled up; a row that is too long shifts the columns or,
with one column asked for, goes unnoticed; a stray quote disappears. All of them take a path for a pattern
(`a[1].parquet` is not found), and write a lock file to the Hugging Face cache even with `streaming=True`.
"""

import csv
import gzip
import json
from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from workbench.texts.formats import is_chat, recognised

HELD_WHOLE = 1 << 28  # characters: of a line of JSON, or of a file that is one piece of it
PLAIN = (".txt", ".md", "")
OBJECTS = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHER_SEPARATORS = ",;\t|"
TABLES = (".parquet", "saved", ".arrow", ".feather")
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, *TABLES)
BY_COLUMNS = "read by columns"
SHAPE = 'Each must be one whole object: {"text": "…"}'


def kind_of(path: Path) -> str:
    """The ending in small letters, without .gz; of a folder, "saved": a `datasets.Dataset` was saved there."""
    if path.is_dir():
        return "saved"
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


def opened(path: Path, encoding: str | None = None) -> Any:
    """The file for reading bytes or, in an encoding, text; a .gz is unpacked as it is read."""
    open_file: Any = gzip.open if path.suffix.lower() == ".gz" else Path.open
    if encoding is None:
        return open_file(path, "rb")
    return open_file(path, "rt", encoding=encoding, newline="\n")


def pieces_of(path: Path, encoding: str, size: int) -> "Iterator[str]":
    """A plain text in pieces of whole lines, each of about `size` characters; line ends stay as they are."""
    with opened(path, encoding) as file:
        while piece := "".join(file.readlines(size)):
            yield piece


def rows_of_file(path: Path, encoding: str, names: "Collection[str]" = ()) -> "Iterator[tuple[int, Any]]":
    """The rows of a file that is no plain text, each with the line or row where it ends; a null is None.

    Args:
        names: columns; of a table only these are read.

    Raises:
        ValueError: a line or row cannot be read.
    """
    if kind_of(path) in OBJECTS:
        return objects(path, encoding)
    if kind_of(path) in SEPARATORS:
        return csv_rows(path, encoding)
    return enumerate(table_rows(path, names), 1)


def unit_of(path: Path) -> str:
    """What is counted in a file, for messages."""
    return "row" if kind_of(path) in (".json", *TABLES) else "line"


# ---- JSON ----


def objects(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """What a JSON file holds, a line each or all in one piece, each with its line or row."""
    rows, _ = json_values(path, encoding)
    for number, row in rows:
        if is_chat(row):
            row = {"messages": row}
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {unit_of(path)} {number} is a {type(row).__name__}, not an object. {SHAPE}")
        yield number, row


def json_values(path: Path, encoding: str) -> "tuple[Iterator[tuple[int, Any]], list[str]]":
    """The values of a JSON file, each with its line or row, and what is odd about its form."""
    if is_of_lines(path, encoding):
        return json_lines(path, encoding), ["read as JSON lines"] if kind_of(path) == ".json" else []
    with opened(path, encoding) as file:
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
    """The lines of a file; of one that is longer than can be held, parts."""
    return iter(partial(file.readline, HELD_WHOLE), "")


def is_of_lines(path: Path, encoding: str) -> bool:
    """Whether a JSON file has an object in every line, whatever it is called: JSON lines are often named .json."""
    with opened(path, encoding) as file:
        filled = list(islice(filter(str.strip, lines_of(file)), 2))
    first = [*filled, ""][0]
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return kind_of(path) == ".jsonl" and not first.lstrip().startswith("[")
    is_whole = isinstance(value, list) and not is_chat(value)
    return len(filled) == 2 or (kind_of(path) == ".jsonl" and not is_whole)


def json_lines(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """The values in the lines of a file that are not blank."""
    with opened(path, encoding) as file:
        for number, line in enumerate(lines_of(file), 1):
            if line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    reason = getattr(error, "msg", error)
                    raise ValueError(f"{path}, line {number} is not JSON ({reason}). {SHAPE}") from None
                yield number, value


def rows_in(data: Any) -> "tuple[list[Any], list[str]]":
    """The rows of a value of JSON: a list, one under a name such as `data`, or columns as pandas writes them; and what
    is odd about that. Raises ValueError for no rows, or several lists."""
    if isinstance(data, list):
        return data, []
    if not isinstance(data, dict):
        twice = ": was it written as JSON twice?" if isinstance(data, str) else ""
        raise ValueError(f"it is a {type(data).__name__}{twice}")
    form = recognised(data)
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
    """Whether all columns have the same numbers, as pandas writes them."""
    return all(isinstance(column, dict) and column.keys() == columns[0].keys() for column in columns)


def is_list_of_rows(values: Any) -> bool:
    is_list = isinstance(values, list) and bool(values)
    return is_list and all(isinstance(value, dict) for value in values) and not is_chat(values)


def note_of(path: Path, encoding: str) -> list[str]:
    """What is odd about the form of a file of JSON or CSV, and what is left out of it."""
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
    """The fields of each row by the header's names, with the line where the row ends."""
    # characters, of four bytes meanwhile; the module's own limit is 131,072
    csv.field_size_limit(2**26)
    header: list[str] = []
    separator, is_spaced, _ = form_of_table(path, encoding)
    with opened(path, encoding) as file:
        rows = csv.reader(file, strict=True, delimiter=separator, skipinitialspace=is_spaced)
        line = 1  # where a row begins; the reader itself counts only lines that it has finished
        try:
            for fields in rows:
                if not header:  # blank lines may stand before it
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
    """Raises ValueError for two columns of one name, of which a row would keep the last."""
    for name in header:
        if name and header.count(name) > 1:
            raise ValueError(
                f"{path} has two columns {name!r}. Rename one of them, or write the columns' names "
                "above, if this is a row."
            )


def form_of_table(path: Path, encoding: str) -> tuple[str, bool, int]:
    """What separates the names of a header: what the file's ending says, or else what is there most often; whether a
    space and a quote follow; and how many blank lines stand before it."""
    usual = SEPARATORS[kind_of(path)]
    blank = 0
    with opened(path, encoding) as file:
        header = file.readline(1 << 16)
        while header and not header.strip():
            blank += 1
            header = file.readline(1 << 16)
    separator = usual if usual in header else max(usual + OTHER_SEPARATORS, key=header.count)
    return separator, f'{separator} "' in header, blank


# ---- tables ----


def table_rows(path: Path, names: "Collection[str]") -> "Iterator[Any]":
    """The rows of a Parquet file or of a data set, with those columns that are named, or all if none is."""
    data: Any
    if kind_of(path) == ".parquet":
        from pyarrow.parquet import ParquetFile

        data = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        columns = data.schema_arrow.names
    else:
        data = saved(path)
        columns = data.column_names
    wanted = [name for name in columns if name in names] or columns
    if kind_of(path) == ".parquet":
        batches = data.iter_batches(64, columns=wanted)
    else:
        batches = data.select_columns(wanted).with_format("arrow").iter(64)
    for batch in batches:
        yield from batch.to_pylist()


def saved(path: Path) -> Any:
    """The data set that `datasets` wrote into a folder, or an Arrow file: a stream, as `datasets` writes it, or what
    pandas and Arrow call Feather."""
    from datasets import Dataset, load_from_disk

    if path.is_dir():
        return load_from_disk(str(path))
    with path.open("rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    if is_stream:
        return Dataset.from_file(str(path))
    from pyarrow.feather import read_table

    return Dataset(read_table(str(path), memory_map=True))
