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
from collections.abc import Iterator
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

from workbench.texts.formats import is_chat, recognised

HELD_WHOLE = {".jsonl": 1 << 28, ".json": 1 << 27}  # characters: of a line, and of a file
PLAIN = (".txt", ".md", "")
OBJECTS = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
OTHER_SEPARATORS = (",", ";", "\t", "|")
TABLES = (".parquet", "saved", ".arrow", ".feather")
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, *TABLES)
BY_COLUMNS = "read by columns"
SPLITS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")


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


def read_documents(
    path: str, column: str = "text", encoding: str = "utf-8-sig", size: int = -1
) -> "Iterator[tuple[int, Any]]":
    """The documents of one file, each with the line or row where it ends; a null is None.

    A file of plain text is one document, given in pieces of `size` characters (-1: in one piece). A saved data set is
    a folder. Line ends stay as they are, but none is cut in two. Of several columns, with commas, each gives a tuple;
    one with a ? after it may be missing.

    Raises:
        KeyError: with the place of a row that has no such column, and the columns that it has.
        ValueError: a line or row cannot be read.
    """
    file = Path(path)
    ending = kind_of(file)
    names = column.replace("?", "").split(",")
    missing = {name.removesuffix("?"): None for name in column.split(",") if name.endswith("?")}
    rows: Iterator[tuple[int, Any]]
    if ending in OBJECTS:
        rows = objects(file, encoding, names)
    elif ending in SEPARATORS:
        rows = csv_rows(file, encoding)
    elif ending in TABLES:
        rows = enumerate(table_rows(file, names, missing), 1)
    else:
        yield from ((1, piece) for piece in pieces(file, encoding, size))
        return
    pick = itemgetter(*names)
    for number, row in rows:
        try:
            document = pick({**missing, **row} if missing else row)
        except KeyError:
            raise KeyError(f"{file}, {unit_of(file)} {number}", list(row)) from None
        yield number, document


def unit_of(path: Path) -> str:
    """What is counted in a file, for messages."""
    return "row" if kind_of(path) in (".json", *TABLES) else "line"


def pieces(path: Path, encoding: str, size: int) -> "Iterator[str]":
    """A plain text in pieces, none of which ends between a carriage return and its line feed."""
    with opened(path, encoding) as file:
        piece = file.read(size)
        while piece:
            after = file.read(size)
            if piece.endswith("\r") and after.startswith("\n"):
                piece += "\n"
                after = after[1:] or file.read(size)
            yield piece
            piece = after


def objects(path: Path, encoding: str, names: list[str]) -> "Iterator[tuple[int, Any]]":
    """What a JSON file holds, a line each or all in one piece, each with its line or row."""
    shape = "Each must be one whole object: {" + ", ".join(f'"{name}": "…"' for name in names) + "}"
    with opened(path, encoding) as file:
        lines = iter(partial(file.readline, HELD_WHOLE[kind_of(path)]), "")
        first = list(first_lines(lines))
        rows: Iterator[tuple[int, Any]]
        if is_of_lines(kind_of(path), first):
            rows = json_lines(path, chain(first, lines), shape)
        else:
            rows = enumerate(json_list(path, in_one_piece(first, file)), 1)
        for number, row in rows:
            if isinstance(row, list) and is_chat(row):
                row = {"messages": row}
            if not isinstance(row, dict):
                raise ValueError(f"{path}, {unit_of(path)} {number} is a {type(row).__name__}, not an object. {shape}")
            yield number, row


def first_lines(lines: "Iterator[str]") -> "Iterator[str]":
    """The first two lines that are not blank, and the blank ones before them."""
    count = 0
    for line in lines:
        yield line
        count += bool(line.strip())
        if count == 2 or not line.endswith("\n"):  # else it is longer than can be held
            return


def in_one_piece(first: list[str], file: Any) -> str:
    """A file as one text, as much of it as can be held, of which the first lines were read."""
    begin = "".join(first)
    rest = max(HELD_WHOLE[".json"] - len(begin), 0)
    return begin + str(file.read(rest))


def is_of_lines(ending: str, first: list[str]) -> bool:
    """Whether a JSON file has an object in every line, whatever it is called: JSON lines are often named .json."""
    filled = [line for line in first if line.strip()]
    try:
        value = json.loads(filled[0] if filled else "")
    except (ValueError, RecursionError):
        return ending == ".jsonl" and not (filled and filled[0].strip() == "[")
    if ending == ".json":
        return len(filled) == 2
    return len(filled) == 2 or not isinstance(value, list) or is_chat(value)


def json_list(path: Path, text: str) -> list[Any]:
    """The rows that a JSON file holds: a list, one under a name such as `data`, or columns as pandas writes them."""
    try:
        rows, _ = rows_in(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON of rows ({error}). It must be one list of objects: [{{...}}, …]"
        ) from None
    return rows


def rows_in(data: Any) -> tuple[list[Any], list[str]]:
    """The rows of a value of JSON, and what is odd about its form. Raises ValueError for no rows, or several lists."""
    if isinstance(data, list):
        return data, []
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}")
    values = list(data.values())
    if data.keys() == {"columns", "index", "data"}:  # pandas, orient="split"
        return [dict(zip(data["columns"], row, strict=True)) for row in data["data"]], [BY_COLUMNS]
    kind = recognised(data)
    if kind and all(isinstance(data[name], str) or is_chat(data[name]) for name in kind.required):
        return [data], ["read as one row"]
    lists = {name: rows for name, rows in data.items() if isinstance(rows, list) and is_list_of_rows(rows)}
    if lists:
        return rows_under(lists)
    if values and all(isinstance(value, list) for value in values) and len(set(map(len, values))) == 1:
        return [dict(zip(data, row, strict=True)) for row in zip(*values, strict=True)], [BY_COLUMNS]
    if values and all(isinstance(value, dict) for value in values) and len({tuple(value) for value in values}) == 1:
        if all(name.isdecimal() for name in data):  # pandas, orient="index"
            return values, ["read by the rows' numbers"]
        if all(number.isdecimal() for number in values[0]):  # pandas' own form
            return [{name: column[number] for name, column in data.items()} for number in values[0]], [BY_COLUMNS]
    if isinstance(data.get("data"), list):
        return data["data"], []
    raise ValueError("it is a dict")


def rows_under(lists: dict[str, list[Any]]) -> tuple[list[Any], list[str]]:
    """The rows that stand under a name; of several splits those of train, and how many the others have."""
    if len(lists) == 1:
        [(name, rows)] = lists.items()
        return rows, [] if name == "data" else [f"the rows under {name!r} are read"]
    if "train" not in lists or not set(lists) <= set(SPLITS):
        raise ValueError(f"it has several lists of rows: {', '.join(lists)[:200]}; save the one to train on alone")
    others = [f"{len(rows)} rows of {name} left out" for name, rows in lists.items() if name != "train"]
    return lists["train"], ["the rows under 'train' are read", *others]


def note_of(path: Path, encoding: str) -> list[str]:
    """What is odd about the form of a file of JSON or CSV, and what is left out of it."""
    ending = kind_of(path)
    if ending in SEPARATORS:
        separator = separator_of(path, encoding)
        return [f"the fields are separated by {separator!r}"] if separator != SEPARATORS[ending] else []
    if ending not in OBJECTS:
        return []
    with opened(path, encoding) as file:
        first = list(first_lines(iter(partial(file.readline, HELD_WHOLE[ending]), "")))
        if is_of_lines(ending, first):
            if "".join(first).lstrip().startswith("["):
                return ["each line is a conversation"]
            return ["read as JSON lines"] if ending == ".json" else []
        rows, notes = rows_in(json.loads(in_one_piece(first, file)))
    if rows and isinstance(rows[0], list):
        notes = [*notes, "each list is a conversation"]
    return ["read as one piece of JSON", *notes] if ending == ".jsonl" else notes


def is_list_of_rows(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values) and not is_chat(values)


def json_lines(path: Path, lines: "Iterator[str]", shape: str) -> "Iterator[tuple[int, Any]]":
    """The values in the lines of a file that are not blank."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
                raise ValueError(f"{path}, line {number} is not JSON ({reason}). {shape}") from None
            yield number, value


def csv_rows(path: Path, encoding: str) -> "Iterator[tuple[int, Any]]":
    """The fields of each row by the header's names, with the line where the row ends."""
    header: list[str] = []
    for first, last, fields in csv_fields(path, encoding):
        if first == 1:
            header = fields
        elif fields:
            if len(fields) != len(header):
                raise ValueError(
                    f"{path}, line {first} has {len(fields)} fields, but the header has {len(header)}. Put text with "
                    "a separator, a quote or a line end in it into double quotes."
                )
            yield last, dict(zip(header, fields, strict=True))


def csv_fields(path: Path, encoding: str) -> "Iterator[tuple[int, int, list[str]]]":
    """The fields of each row, the header's first, with the lines where the row begins and ends."""
    csv.field_size_limit(2**26)  # characters, of four bytes meanwhile; the module's own limit is 131,072
    delimiter = separator_of(path, encoding)
    with opened(path, encoding) as file:
        rows = csv.reader(file, strict=True, delimiter=delimiter)
        first = 1  # the reader itself counts only lines that it has finished
        try:
            for fields in rows:
                yield first, rows.line_num, fields
                first = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {first} is not CSV ({error}). Close every double quote; double those in a text."
            ) from None


def separator_of(path: Path, encoding: str) -> str:
    """What stands between the fields of a header: what the file's ending says, if that gives names that are known or
    more than one; else what gives known names, or the most.
    """
    usual = SEPARATORS[kind_of(path)]
    with opened(path, encoding) as file:
        line = file.readline(1 << 16)
    headers = {}
    for separator in (usual, *OTHER_SEPARATORS):
        try:
            headers[separator] = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:
            headers[separator] = []
    for separator, names in headers.items():
        if recognised(names):
            return separator
    if len(headers[usual]) > 1:
        return usual
    return max(headers, key=lambda separator: len(headers[separator]))


def table_rows(path: Path, names: list[str], missing: Any = ()) -> "Iterator[Any]":
    """The rows of a Parquet file or of a data set, by column; those that may be missing only where they are there."""
    if kind_of(path) == ".parquet":
        from pyarrow.parquet import ParquetFile

        file = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        wanted = [name for name in names if name not in missing or name in file.schema_arrow.names]
        batches = file.iter_batches(64, columns=wanted)
    else:
        data_set = saved(path)
        wanted = [name for name in names if name not in missing or name in data_set.column_names]
        batches = data_set.select_columns(wanted).with_format("arrow").iter(64)
    for batch in batches:
        yield from batch.to_pylist()


def saved(path: Path) -> Any:
    """The data set that `datasets` wrote into a folder, or an Arrow file: a stream, as `datasets` writes it, or what
    pandas and Arrow call Feather."""
    from datasets import Dataset, load_from_disk

    if path.is_dir():
        return load_from_disk(str(path))
    with path.open("rb") as file:
        begin = file.read(6)
    if begin.startswith((b"ARROW1", b"FEA1")):
        from pyarrow.feather import read_table

        return Dataset(read_table(str(path), memory_map=True))
    return Dataset.from_file(str(path))
