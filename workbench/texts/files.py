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

from workbench.texts.formats import parse_json

HELD_WHOLE = 1 << 28  # 268 million characters: the longest line of JSON, or file that is one piece of JSON
UNPACKED_TIMES = 100  # the most bytes of a packed file, for each of its own
UNPACKED_AT_LEAST = 1 << 24  # the most bytes of a small packed file
PLAIN = (".txt", ".md", "")
OBJECTS = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, ".parquet", "saved")
TABLES = (".parquet", "saved", ".arrow")  # the last is in the cache of `datasets`
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


def pieces_of(path: Path, encoding: str, size: int) -> Iterator[str]:
    """Yield a plain text in pieces of whole lines, each of about `size` characters. Line ends stay as they are."""
    with open_file(path, encoding) as file:
        while piece := "".join(file.readlines(size)):
            yield piece


def rows_of_file(path: Path, encoding: str, names: Collection[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
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


def unit_of(path: Path, encoding: str) -> str:
    """Name what messages count in a file: rows or lines."""
    is_list = kind_of(path) in OBJECTS and not is_of_lines(path, encoding)
    return "row" if is_list or kind_of(path) in TABLES else "line"


# ---- JSON ----


def json_rows(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a JSON file, each with the number of its line or row.

    The file is one list of objects, or has an object in every line; its ending does not tell, because JSON lines are
    often named .json.

    Raises ValueError: it is neither, a row is no object, or an object has a name twice.
    """
    values = json_lines(path, encoding) if is_of_lines(path, encoding) else enumerate(json_list(path, encoding), 1)
    for number, row in values:
        if not isinstance(row, dict):
            place = f"{path}, {unit_of(path, encoding)} {number}"
            raise ValueError(f"{place} is a {type(row).__name__}, not an object. {SHAPE}")
        yield number, row


def is_of_lines(path: Path, encoding: str) -> bool:
    """Whether a JSON file has an object in every line: its first line is one, and in a .json another line follows."""
    with open_file(path, encoding) as file:
        lines = list(islice(filter(str.strip, lines_of(file)), 2))
    first = lines[0] if lines else ""
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return kind_of(path) == ".jsonl" and not first.lstrip().startswith("[")
    return not isinstance(value, list) and (kind_of(path) == ".jsonl" or len(lines) == 2)


def lines_of(file: Any) -> Iterator[str]:
    """Return the lines of a file; a line of more than HELD_WHOLE characters comes in parts."""
    return iter(partial(file.readline, HELD_WHOLE), "")


def json_lines(path: Path, encoding: str) -> Iterator[tuple[int, Any]]:
    """Yield the values in the lines of a file that are not blank, each with the number of its line."""
    with open_file(path, encoding) as file:
        for number, line in enumerate(lines_of(file), 1):
            if line.strip():
                try:
                    value = parse_json(line)
                except (ValueError, RecursionError) as error:
                    reason = getattr(error, "msg", error)
                    raise ValueError(f"{path}, line {number} is not JSON ({reason}). {SHAPE}") from None
                yield number, value


def json_list(path: Path, encoding: str) -> list[Any]:
    """Return the values of a file that is one list of JSON. Raises ValueError: it is not, or it is too long."""
    with open_file(path, encoding) as file:
        text = file.read(HELD_WHOLE + 1)
    if len(text) > HELD_WHOLE:
        raise ValueError(
            f"{path} is a list of more than {HELD_WHOLE:,} characters. Write it as .jsonl, a row per line."
        )
    try:
        values = parse_json(text)
        if not isinstance(values, list):
            names = f" with {', '.join(values)}" if isinstance(values, dict) else ""
            raise ValueError(f"it is a {type(values).__name__}{names:.80}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read as a list of objects ({error}). It must be [{{…}}, …], or have an object per line; "
            'pandas writes the list with orient="records".'
        ) from None
    return values


# ---- CSV ----


def csv_rows(path: Path, encoding: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the fields of each row by the header's names, with the number of the line where the row ends.

    Fields are separated by a comma in .csv and by a tab in .tsv. Blank lines are left out.

    Raises ValueError: the header is no such one, a row has more or fewer fields, or a quote is not closed.
    """
    # The longest field, in characters of four bytes. The default is 131,072.
    csv.field_size_limit(2**26)
    header: list[str] = []
    check_separator(path, encoding)
    with open_file(path, encoding) as file:
        rows = csv.reader(file, strict=True, delimiter=SEPARATORS[kind_of(path)])
        line = 1  # the line where a row begins; the reader counts lines that it has finished
        try:
            for fields in rows:
                if not header:
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


def check_separator(path: Path, encoding: str) -> None:
    """Raise ValueError for a header whose fields are separated in another way than the file's ending says."""
    separator = SEPARATORS[kind_of(path)]
    with open_file(path, encoding) as file:
        header = next(filter(str.strip, lines_of(file)), "").strip()
    others = [other for other in (f'{separator} "', ",", ";", "\t", "|") if other in header]
    if others and (separator not in header or others[0] == f'{separator} "'):
        other = others[0].removesuffix('"')
        raise ValueError(
            f"{path} has the header {header!r:.80}, whose fields are not separated by {separator!r} alone. Write it "
            f"so, for example with pandas: read_csv(…, sep={other!r}).to_csv(…)"
        )


def check_header(path: Path, header: list[str]) -> None:
    """Raise ValueError for two columns of one name: a row would keep only the last of them."""
    for name in header:
        if name and header.count(name) > 1:
            raise ValueError(
                f"{path} has two columns {name!r}. Rename one of them, or write the columns' names "
                "above, if this is a row."
            )


# ---- tables ----


def table_rows(path: Path, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file or of a saved dataset, in the named columns that it has, or in all if it has
    none of these."""
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
    """Open a dataset: a folder that `datasets` wrote, or an Arrow file in its cache."""
    from datasets import Dataset, load_from_disk

    return load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))
