"""The user's own files to documents: the one place that reads text.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:body` (the column),
`reviews.csv:column=body,encoding=cp1252`. Every fault names the file, the line or row, and a cure.
"""

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.errors import ConfigurationError

CHUNK_BYTES = 1 << 20
ROWS_AT_A_TIME = 1000
CSV_FIELD_LIMIT = 2**31 - 1  # characters; the csv module's own limit is 131,072
MAGIC = {b"%PDF": "PDF", b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd"}

Document = tuple[str, Iterable[str] | None]
"""Where it stands, and its text in pieces; None for a null."""


@dataclass(frozen=True)
class TextSource:
    """A file, or a folder of files, with the column and the encoding to read."""

    name: str
    path: Path
    column: str = "text"
    encoding: str = "utf-8-sig"

    def documents(self) -> Iterator[Document]:
        """Every document, in the order of the files' names; line ends are `\\n`. Nothing is held in memory.

        Raises:
            ConfigurationError: a file cannot be read as what it claims to be.
        """
        for path in self.files():
            yield from _reader(path)(path, self)

    def files(self) -> list[Path]:
        """The path itself, or what a folder holds of the known kinds, hidden files left out."""
        if not self.is_folder:
            return [self.path]
        return [path for path in _visible(self.path) if path.suffix.lower() in READERS and path.suffix]

    @property
    def is_folder(self) -> bool:
        """A folder of texts; one that a `datasets.Dataset` was saved to counts as a file."""
        return self.path.is_dir() and not _is_saved_dataset(self.path)

    def others(self) -> list[Path]:
        """Files of a folder that are of no known kind."""
        read = set(self.files())
        return [path for path in _visible(self.path) if path not in read] if self.is_folder else []

    def signature(self) -> tuple[tuple[str, int, int], ...]:
        """Names, sizes and times of change of all files: another one means that the text may be another."""
        found = []
        for path in self.files():
            with _readable(path):
                facts = path.stat()
                found.append((str(path), facts.st_size, facts.st_mtime_ns))
        return tuple(found)


def find_text(name: str, alternatives: str) -> TextSource:
    """What a name means. `alternatives` says what else could have been given, for the message.

    Raises:
        ConfigurationError: no such file, a kind that is not read, an unknown option or encoding, an empty folder.
    """
    location, options = _split(name)
    path = Path(os.path.expanduser(location))
    if not os.path.exists(path):
        raise ConfigurationError(
            f"corpus: there is no file {name!r} (looked in {Path.cwd()}), and no embedded text of that name. "
            f"{alternatives}"
        )
    source = TextSource(name, path, **_options(name, options))
    if source.is_folder and not source.files():
        held = sorted({other.suffix or other.name for other in source.others()})
        words = f"only {', '.join(held[:5])}" if held else "it is empty"
        raise ConfigurationError(
            f"corpus: the folder {name!r} has no text in it ({words}). Put {_kinds()} files there."
        )
    for file in source.files():
        _reader(file)
    return source


def absolute(name: str) -> str:
    """The same name from any working directory; unchanged where it names no file, nor a folder written as a path."""
    location, options = _split(name)
    path = Path(os.path.expanduser(location))
    if os.path.isfile(path) or (os.path.isdir(path) and {os.sep, "/"} & set(location)):
        return f"{path.resolve()}:{options}" if options else str(path.resolve())
    return name


def _split(name: str) -> tuple[str, str]:
    """Path and options. A colon may be part of an existing path, and of a drive."""
    if os.path.exists(os.path.expanduser(name)) or ":" not in name:
        return name, ""
    location, _, options = name.rpartition(":")
    return (location, options) if os.path.exists(os.path.expanduser(location)) else (name, "")


def _options(name: str, options: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            key, value = "column", option
        if key not in ("column", "encoding"):
            raise ConfigurationError(f"corpus: {name!r}: there is no option {key!r}. Known: column, encoding.")
        found[key] = value
    if "encoding" in found:
        found["encoding"] = _encoding(found["encoding"])
    return found


def _encoding(name: str) -> str:
    try:
        "".encode(name)  # a codec may be known and be none of text, as base64
        canonical = codecs.lookup(name).name
    except (LookupError, ValueError):
        raise ConfigurationError(
            f"corpus: there is no encoding {name!r}. Common ones: utf-8, latin-1, cp1252, utf-16, shift_jis."
        ) from None
    return "utf-8-sig" if canonical == "utf-8" else canonical


def _visible(folder: Path) -> list[Path]:
    inside = (path for path in folder.rglob("*") if path.is_file())
    shown = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    return sorted(shown, key=lambda path: path.relative_to(folder).as_posix())


def _kinds() -> str:
    return ", ".join(filter(None, READERS))


def _reader(path: Path) -> Callable[[Path, TextSource], Iterator[Document]]:
    if path.is_dir():
        return _saved_dataset
    if not path.is_file():
        raise ConfigurationError(f"corpus: {path} is not a regular file. Give a file with text in it.")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(
            f"corpus: {path} ends in {path.suffix}, which is not read. Give {_kinds()}, or a folder of these."
        )
    return reader


# ---- plain text ----


def _plain(path: Path, source: TextSource) -> Iterator[Document]:
    yield str(path), _decoded(path, source.encoding)


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    """The file's text in pieces, without a byte order mark, with `\\n` as line end."""
    decoder, line, held = codecs.getincrementaldecoder(encoding)(), 1, ""
    with _readable(path), path.open("rb") as file:
        data = file.read(CHUNK_BYTES)
        _refuse_binary(path, data)
        while True:
            if b"\0" in data and not encoding.startswith(("utf-16", "utf-32")):
                raise _binary(path, data)
            try:
                piece = held + decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise _undecodable(path, encoding, error, line) from None
            held = "\r" if data and piece.endswith("\r") else ""  # its `\n` may come with the next chunk
            piece = piece.removesuffix(held).replace("\r\n", "\n")
            line += piece.count("\n")
            if piece:
                yield piece
            if not data:
                return
            data = file.read(CHUNK_BYTES)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        words = error.strerror or error
        raise ConfigurationError(f"corpus: {path} cannot be read: {words}. Check its permissions.") from None


def _refuse_binary(path: Path, data: bytes) -> None:
    kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
    if kind is not None:
        raise ConfigurationError(
            f"corpus: {path} is not a text file: it begins like a {kind} file. Unpack or convert it, or give it its "
            "own ending."
        )


def _binary(path: Path, data: bytes) -> ConfigurationError:
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    cure = f"It looks like UTF-16: {path}:encoding=utf-16" if wide else "Give a file with text in it."
    return ConfigurationError(f"corpus: {path} is not a text file: it contains zero bytes. {cure}")


def _undecodable(path: Path, encoding: str, error: UnicodeDecodeError, line: int) -> ConfigurationError:
    line += error.object.count(b"\n", 0, error.start)
    name = encoding.removesuffix("-sig").upper()
    what = f"byte {error.object[error.start]:#04x} in line {line}"
    if error.reason.startswith("unexpected end"):
        return ConfigurationError(
            f"corpus: {path} ends inside a character ({what}): it was cut off, or it is not {name}. Copy it again, or "
            f"name its encoding: {path}:encoding=latin-1"
        )
    other = "cp1252" if encoding == "iso8859-1" else "latin-1" if name == "UTF-8" else "utf-8"
    return ConfigurationError(
        f"corpus: {path} is not {name}: {what}. Name its encoding, for example {path}:encoding={other}, or convert it: "
        f"iconv -f {other.replace('latin-1', 'latin1')} -t utf-8 {path.name} > fixed{path.suffix}"
    )


# ---- rows with columns ----


def _lines(pieces: Iterable[str]) -> Iterator[str]:
    """Lines with their ends; only `\\n` ends one."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield line + "\n"
    if rest:
        yield rest


def _value(where: str, column: str, value: Any) -> Document:
    if value is None:
        return where, None
    if not isinstance(value, str):
        raise ConfigurationError(
            f"corpus: {where}: {column!r} holds a {type(value).__name__}, not a text. Choose another column, or make "
            "it a text."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"corpus: {where}: character {error.start + 1} is half of a surrogate pair, which no text can have. "
            "Remove it, or write the file again as UTF-8."
        ) from None
    return where, (value.replace("\r\n", "\n"),)


def _no_column(where: str, source: TextSource, columns: Iterable[Any]) -> ConfigurationError:
    found = [str(column) for column in columns]
    plain = source.name.rpartition(":")[0] if source.column != "text" else source.name
    cure = f"Name one: {plain}:{next(iter(found), 'COLUMN')}"
    if len(found) == 1 and any(mark in found[0] for mark in ";\t|"):
        cure = "The fields seem not to be separated by commas: save it with commas, or with tabs as .tsv"
    return ConfigurationError(f"corpus: {where} has no column {source.column!r}; it has {', '.join(found)}. {cure}")


def _json_lines(path: Path, source: TextSource) -> Iterator[Document]:
    shape = f'Each line must be one whole object: {{"{source.column}": "…"}}'
    for number, line in enumerate(_lines(_decoded(path, source.encoding)), 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            words = getattr(error, "msg", "nested too deeply" if isinstance(error, RecursionError) else str(error))
            raise ConfigurationError(f"corpus: {where} is not JSON ({words}). {shape}") from None
        if not isinstance(row, dict):
            raise ConfigurationError(f"corpus: {where} is a {type(row).__name__}, not an object. {shape}")
        if source.column not in row:
            raise _no_column(where, source, row)
        yield _value(where, source.column, row[source.column])


def _csv(path: Path, source: TextSource, separator: str = ",") -> Iterator[Document]:
    csv.field_size_limit(CSV_FIELD_LIMIT)
    rows = csv.reader(_lines(_decoded(path, source.encoding)), strict=True, delimiter=separator)
    line = first = 1
    try:
        header = next(rows, [])
        column = _position(path, source, header)
        line = first = rows.line_num + 1
        for row in rows:
            where, line = f"{path}, line {line}", rows.line_num + 1
            if row and len(row) != len(header):
                raise ConfigurationError(
                    f"corpus: {where} has {len(row)} fields, but the header has {len(header)}. Put text with a "
                    "separator, a quote or a line end in it into double quotes."
                )
            if row:
                yield _value(where, source.column, row[column])
    except csv.Error as error:
        raise ConfigurationError(
            f"corpus: {path}, line {line} is not CSV ({error}). Close every double quote; double those in a text."
        ) from None
    if line == first:
        raise ConfigurationError(f"corpus: {path} is empty: it has a header, but no rows. Give a file with rows.")


def _position(path: Path, source: TextSource, header: list[str]) -> int:
    if not header:
        raise ConfigurationError(f"corpus: {path} is empty. Give a file with a header and rows.")
    if source.column not in header:
        raise _no_column(str(path), source, header)
    if header.count(source.column) > 1:
        raise ConfigurationError(f"corpus: {path} has two columns {source.column!r}. Rename one of them.")
    return header.index(source.column)


def _tsv(path: Path, source: TextSource) -> Iterator[Document]:
    return _csv(path, source, "\t")


def _parquet(path: Path, source: TextSource) -> Iterator[Document]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            if source.column not in file.schema_arrow.names:
                raise _no_column(str(path), source, file.schema_arrow.names)
            row = 0
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=[source.column]):
                for row, value in enumerate(batch.column(0).to_pylist(), row + 1):  # noqa: B020
                    yield _value(f"{path}, row {row}", source.column, value)
    except (pyarrow.ArrowException, OSError) as error:
        words = str(error).splitlines()[0]
        raise ConfigurationError(
            f"corpus: {path} is not a whole Parquet file ({words}). Write or copy it again."
        ) from None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _saved_dataset(path: Path, source: TextSource) -> Iterator[Document]:
    """What `datasets.Dataset.save_to_disk` wrote, memory-mapped."""
    import pyarrow
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
        raise ConfigurationError(
            f"corpus: the data set saved in {path} is empty or damaged ({error}). Save it again."
        ) from None
    if isinstance(dataset, DatasetDict):
        raise ConfigurationError(
            f"corpus: {path} holds the splits {', '.join(dataset)}. Give one: {path / next(iter(dataset), 'train')}"
        )
    if source.column not in dataset.column_names:
        raise _no_column(str(path), source, dataset.column_names)
    if not len(dataset):
        return
    batches = dataset.with_format(None).select_columns([source.column]).iter(ROWS_AT_A_TIME)
    values = (value for batch in batches for value in batch[source.column])
    for row, value in enumerate(values, 1):
        yield _value(f"{path}, row {row}", source.column, value)


READERS: dict[str, Callable[[Path, TextSource], Iterator[Document]]] = {
    ".txt": _plain, ".md": _plain, "": _plain, ".jsonl": _json_lines, ".csv": _csv, ".tsv": _tsv, ".parquet": _parquet,
}  # fmt: skip
