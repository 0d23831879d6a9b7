"""The user's own files to documents: the one place that reads text.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:body` (the column),
`reviews.csv:column=body,encoding=cp1252`. Every fault names the file, the line or row, and a cure.

`datasets` reads what it saved itself; its loaders of text, JSON, CSV and Parquet (5.2) are not used, because each
changes texts without a word. Text: a lone carriage return becomes a line end, a long line is held whole. JSON: texts
that look like dates become dates, a missing key becomes a null, a broken line has no number, UTF-16 is cut inside a
character. CSV (pandas): a short row is filled up; a row that is too long shifts the columns or, with one column
asked for, goes unnoticed; a stray quote disappears. All of them take a path for a pattern (`a[1].parquet` is not
found), and write a lock file to the Hugging Face cache even with `streaming=True`.
"""

import codecs
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from workbench.errors import ConfigurationError

CHUNK = 1 << 20  # bytes to check, characters to read at a time
Signature = tuple[tuple[Any, ...], ...]
KINDS = (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet")
PLAIN, TABLES, SEPARATORS = (".txt", ".md", ""), (".parquet", "saved"), {".csv": ",", ".tsv": "\t"}
SAVED = ("dataset_dict.json", "state.json")  # what tells a folder that `datasets` wrote
WITHOUT = {"column": PLAIN, "encoding": TABLES}  # options, and the kinds that have no such thing
SURROGATE = re.compile(r"[\ud800-\udfff]")
MAGIC = {b"%PDF": "PDF", b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd"}


def refusal(words: str) -> ConfigurationError:
    """The error that says what is wrong with a text, and what to do."""
    return ConfigurationError(f"corpus: {words}")


def read_documents(
    path: str, column: str = "text", encoding: str = "utf-8-sig", size: int = -1
) -> "Iterator[tuple[int, Any]]":
    """The documents of one file that has been checked, each with the line or row where it ends; a null is None.

    A file of plain text is one document, given in pieces of `size` characters (-1: in one piece). A saved data set is
    a folder. Line ends stay as they are, but none is cut in two.
    """
    kind = "saved" if Path(path).is_dir() else Path(path).suffix.lower()
    if kind in ("saved", ".parquet"):
        if kind == "saved":
            from datasets import load_from_disk

            batches = load_from_disk(path).with_format(None).select_columns([column]).iter(64)
        else:
            from pyarrow.parquet import ParquetFile

            file = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            batches = (batch.to_pydict() for batch in file.iter_batches(64, columns=[column]))
        yield from enumerate((text for batch in batches for text in batch[column]), 1)
        return
    with Path(path).open(encoding=encoding, newline="\n") as file:
        if kind == ".jsonl":
            yield from ((number, json.loads(line)[column]) for number, line in enumerate(file, 1) if line.strip())
        elif kind in (".csv", ".tsv"):
            csv.field_size_limit(2**26)  # characters, of four bytes meanwhile; the module's own limit is 131,072
            rows = csv.reader(file, strict=True, delimiter="\t" if kind == ".tsv" else ",")
            header = next(rows)
            for row in filter(None, rows):
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} fields, but the header has {len(header)}")
                yield rows.line_num, row[header.index(column)]
        else:
            piece = file.read(size)
            while piece:
                after = file.read(size)
                if piece.endswith("\r") and after.startswith("\n"):
                    piece, after = piece + "\n", after[1:] or file.read(size)
                yield 1, piece
                piece = after


@dataclass(frozen=True)
class TextSource:
    """A file, or a folder of files, with the column and the encoding to read."""

    name: str
    path: Path
    column: str = "text"
    encoding: str = "utf-8-sig"

    def documents(self) -> Iterator[Iterable[str] | None]:
        """Every document in pieces, None for a null, in the order of the files' names; line ends are `\\n`.

        Nothing is held in memory but a piece of a plain text, or a row.

        Raises:
            ConfigurationError: a file cannot be read as what it claims to be.
        """
        for path in self.files():
            texts = _documents(path, self)
            yield from [texts] if _kind(path) in PLAIN else (None if text is None else _parts(text) for text in texts)

    def files(self) -> list[Path]:
        """The path itself, or what a folder holds of the known kinds, hidden files left out."""
        return [path for path in _visible(self.path) if path.suffix.lower() in KINDS] if self.is_folder else [self.path]

    @property
    def is_folder(self) -> bool:
        """A folder of texts; one that a `datasets.Dataset` was saved to counts as a file."""
        return self.path.is_dir() and not any((self.path / name).is_file() for name in SAVED)

    def others(self) -> list[Path]:
        """Files of a folder that are of no known kind."""
        return [path for path in _visible(self.path) if path.suffix.lower() not in KINDS] if self.is_folder else []

    def signature(self) -> Signature:
        """Names, sizes, times of change and inodes of all files: another one means that the text may be another. A time
        of writing can be set back, one of change cannot."""
        files = [file for path in self.files() for file in (_visible(path) if path.is_dir() else [path])]
        try:
            facts = [(str(file), file.stat()) for file in files]
        except OSError as error:
            _refuse(error)
        return tuple((name, fact.st_size, fact.st_mtime_ns, fact.st_ctime_ns, fact.st_ino) for name, fact in facts)


def _parts(text: str) -> Iterable[str]:
    """A text in parts of CHUNK characters; none if it is blank."""
    return () if text.isspace() else (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


def find_text(name: str, alternatives: str) -> TextSource:
    """What a name means. `alternatives` says what else could have been given, for the message.

    Raises:
        ConfigurationError: no such file, a kind that is not read, an unknown option or encoding, an empty folder.
    """
    location, options = _split(name)
    path = Path(os.path.expanduser(location))
    if not (location and os.path.exists(path)):
        raise refusal(f"there is no file {name!r:.200} (looked in {Path.cwd()}), nor an embedded text. {alternatives}")
    source = TextSource(name, path)
    files = source.files()
    if not files:
        held = sorted({other.suffix or other.name for other in source.others()})
        words = f"only {', '.join(held[:5])}" if held else "it is empty"
        raise refusal(f"the folder {location!r} has no text in it ({words}). Put {', '.join(KINDS)} files there.")
    for file in files:
        _check_kind(file)
    return replace(source, **_options(name, options, {_kind(file) for file in files}))


def absolute(name: str) -> str:
    """The same name from any working directory; unchanged where it names no file, nor a folder written as a path."""
    location, options = _split(name)
    path = Path(os.path.expanduser(location))
    if os.path.isfile(path) or (os.path.isdir(path) and {os.sep, "/"} & set(location)):
        return f"{path.resolve()}{options}"
    return name


def _split(name: str) -> tuple[str, str]:
    """Path, and options with their colon. A colon may be part of an existing path, and of a drive."""
    location, colon, options = name.rpartition(":")
    named, found = (os.path.exists(os.path.expanduser(path)) for path in (name, location))
    return (location, colon + options) if found and not named else (name, "")


def _options(name: str, options: str, kinds: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options[1:].split(",") if options else ():
        key, value = option.split("=", 1) if "=" in option else ("column", option)
        if key not in WITHOUT:
            raise refusal(f"{name!r}: there is no option {key!r}. Known: {', '.join(WITHOUT)}.")
        if key in found or not value:
            raise refusal(f"{name!r}: {key} is {'given twice' if value else 'empty'}. Give one {key}, or none.")
        if kinds <= set(WITHOUT[key]):
            other = f"only {'encoding' if key == 'column' else 'column'}=… can be given"
            raise refusal(f"{name!r}: {min(kinds) or 'plain text'} has no {key}, {other}. Leave {option!r} out.")
        found[key] = _encoding(value) if key == "encoding" else value
    return found


def _encoding(name: str) -> str:
    try:
        "".encode(name)  # a codec may be known and be none of text, as base64
        canonical = codecs.lookup(name).name
    except (LookupError, ValueError):
        raise refusal(f"there is no encoding {name!r}. Common ones: utf-8, latin-1, cp1252, shift_jis.") from None
    return "utf-8-sig" if canonical == "utf-8" else canonical


def _visible(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, hidden ones left out."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in filter(Path.is_symlink, (Path(place, name) for name in folders)):
            raise refusal(f"{link} is a link to a folder, which is not followed. Put the folder there, or remove it.")
        found += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _kind(path: Path) -> str:
    """The ending in small letters; of a folder, "saved": a `datasets.Dataset` was saved there."""
    return "saved" if path.is_dir() else path.suffix.lower()


def _check_kind(path: Path) -> None:
    if SURROGATE.search(str(path)):
        raise refusal(f"the name {str(path)!r} is not UTF-8, so that no record can hold it. Rename it.")
    if not path.is_file() and not path.is_dir():
        what = "a link that leads nowhere" if not path.exists() else "not a regular file"
        raise refusal(f"{path} is {what}. Give a file with text in it.")
    if _kind(path) not in ("", "saved", *KINDS):
        raise refusal(f"{path} ends in {path.suffix}, which is not read. Give {', '.join(KINDS)}, or a folder.")


def _documents(path: Path, source: TextSource) -> Iterator[Any]:
    """The texts that `read_documents` gives, checked, and with a place and a cure for every fault."""
    unit, number = "row" if _kind(path) in TABLES else "line", 0
    try:
        if unit == "line" and not _check_bytes(path, source.encoding) and _kind(path) in PLAIN:
            return
        header = number = _check_columns(path, source)
        for number, text in read_documents(str(path), source.column, source.encoding, CHUNK):
            yield _checked(f"{path}, {unit} {number}", source.column, text)
    except ConfigurationError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, csv.Error) as error:
        raise _fault(path, source, number, error) from None
    if number == header > 0:
        raise refusal(f"{path} is empty: it has a header, but no rows. Give a file with rows.")


def _check_columns(path: Path, source: TextSource) -> int:
    """Refuses a file without the column where that is known before its rows; the lines of a CSV header, or 0."""
    if _kind(path) in (".jsonl", *PLAIN):
        return 0
    columns = _columns(path, source)
    if not columns and _kind(path) in SEPARATORS:
        raise refusal(f"{path} is empty. Give a file with a header and rows.")
    if source.column not in columns:
        raise _no_column(str(path), source, columns)
    if columns.count(source.column) > 1:
        raise refusal(f"{path} has two columns {source.column!r}. Rename one of them.")
    return "".join(["\n", *columns]).count("\n") if _kind(path) in SEPARATORS else 0


def _columns(path: Path, source: TextSource) -> list[str]:
    if separator := SEPARATORS.get(_kind(path)):
        with path.open(encoding=source.encoding, newline="\n") as file:
            return next(csv.reader(file, strict=True, delimiter=separator), [])
    if path.is_file():
        from pyarrow.parquet import read_schema

        return list(read_schema(path).names)
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    if isinstance(saved, DatasetDict):
        first = path / next(iter(saved), "train")
        raise refusal(f"{path} holds the splits {', '.join(saved)}. Give one: {first}")
    return list(saved.column_names)


def _checked(where: str, column: str, text: Any) -> str | None:
    """The text with plain line ends; None for a null."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise refusal(f"{where}: {column!r} holds a {type(text).__name__}, not a text. Choose another column.")
    if not text.isascii() and (found := SURROGATE.search(text)):
        half = f"character {found.end()} is half of a surrogate pair, which no text can have"
        raise refusal(f"{where}: {half}. Remove it, or write the file again as UTF-8.")
    return text.replace("\r\n", "\n")


# ---- what is wrong, and where ----


def _check_bytes(path: Path, encoding: str) -> bool:
    """Refuses what is no text in this encoding; whether there is more in it than white space."""
    decoder, line, data, shown = codecs.getincrementaldecoder(encoding)(), 1, b"begin", False
    with path.open("rb") as file:
        begin = file.peek(4)
        for kind in (kind for magic, kind in MAGIC.items() if begin.startswith(magic)):
            raise refusal(f"{path} is not a text file: it begins like a {kind} file. Unpack it, or correct its ending.")
        while data:
            data = file.read(CHUNK)
            if b"\0" in data and not encoding.startswith(("utf-16", "utf-32")):
                wide = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                cure = f"It looks like UTF-16: {path}:encoding=utf-16" if wide else "Give a file with text in it."
                raise refusal(f"{path} is not a text file: it contains zero bytes. {cure}")
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeError as error:
                raise _undecodable(path, encoding, error, line) from None
            line, shown = line + text.count("\n"), shown or (bool(text) and not text.isspace())
    return shown


def _undecodable(path: Path, encoding: str, error: UnicodeError, line: int) -> ConfigurationError:
    """`line` is the one where the bytes of the error begin."""
    name = encoding.removesuffix("-sig").upper()
    if not isinstance(error, UnicodeDecodeError):
        return refusal(f"{path} is not {name}: {error}. Name its encoding, for example {path}:encoding=utf-8")
    line += error.object.count(b"\n", 0, error.start)
    what = f"byte {error.object[error.start]:#04x} in line {line}"
    if error.reason.startswith("unexpected end"):
        cure = f"Copy it again, or name its encoding: {path}:encoding=latin-1"
        return refusal(f"{path} ends inside a character ({what}): it was cut off, or it is not {name}. {cure}")
    other = "cp1252" if encoding == "iso8859-1" else "latin-1" if name == "UTF-8" else "utf-8"
    convert = f"iconv -f {other.replace('latin-1', 'latin1')} -t utf-8 {path.name} > fixed{path.suffix}"
    cure = f"Name its encoding, for example {path}:encoding={other}, or convert it: {convert}"
    return refusal(f"{path} is not {name}: {what}. {cure}")


def _no_column(where: str, source: TextSource, columns: Iterable[Any]) -> ConfigurationError:
    found = [str(column)[:80] for column in columns][:20]
    plain = source.name.rpartition(":")[0] if source.column != "text" else source.name
    cure = f"Name one: {plain}:{next(iter(found), 'COLUMN')}"
    if len(found) == 1 and any(mark in found[0] for mark in ";\t|"):
        cure = "The fields seem not to be separated by commas: save it with commas, or with tabs as .tsv"
    return refusal(f"{where} has no column {source.column!r}; it has {', '.join(found)}. {cure}")


def _refuse(error: OSError, path: Path | None = None) -> NoReturn:
    words = f"{path or error.filename} cannot be read: {error.strerror or error}. Check its permissions."
    raise refusal(words) from None


def _fault(path: Path, source: TextSource, after: int, error: Exception) -> ConfigurationError:
    """What stopped the reading after line `after`; in lines, it was the next one that is not blank."""
    if path.is_dir():
        return refusal(f"the data set saved in {path} is empty or damaged ({error}). Save it again.")
    if _kind(path) in TABLES:
        words = str(error).partition("\n")[0]
        return refusal(f"{path} is not a whole Parquet file ({words}). Write or copy it again.")
    if isinstance(error, OSError):
        _refuse(error, path)
    blank = "\r\n" if _kind(path) in SEPARATORS else None  # a CSV row may be a space
    with path.open(encoding=source.encoding, newline="\n") as file:
        number, line = next((n, line) for n, line in enumerate(file, 1) if n > after and line.strip(blank))
    where = f"{path}, line {number}"
    if isinstance(error, csv.Error):
        return refusal(f"{where} is not CSV ({error}). Close every double quote; double those in a text.")
    if _kind(path) in SEPARATORS:
        cure = "Put text with a separator, a quote or a line end in it into double quotes."
        return refusal(f"{where} has {error}. {cure}")
    if isinstance(error, KeyError):
        return _no_column(where, source, json.loads(line))
    shape = f'Each line must be one whole object: {{"{source.column}": "…"}}'
    if isinstance(error, TypeError):
        return refusal(f"{where} is a {type(json.loads(line)).__name__}, not an object. {shape}")
    words = getattr(error, "msg", "nested too deeply" if isinstance(error, RecursionError) else str(error))
    return refusal(f"{where} is not JSON ({words}). {shape}")
