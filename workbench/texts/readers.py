"""The user's own files to documents: the one place that reads text.

A name is a path, with options after a colon: `novel.txt`, `old.txt:encoding=latin-1`, `reviews.csv:body` (the column),
`reviews.csv:column=body,encoding=cp1252`; or a data set of the Hugging Face hub, in which `user/set:test` is a split
and `user/set:train[:10%]` a part of one. Every fault names the file, the line or row, and a cure.

`datasets` reads what it saved itself and what the hub has; its loaders of text, JSON, CSV and Parquet (5.2) are not
used for files, because each changes texts without a word. Text: a lone carriage return becomes a line end, a long line
is held whole. JSON: texts that look like dates become dates, a missing key becomes a null, a broken line has no number,
UTF-16 is cut inside a character. CSV (pandas): a short row is filled up; a row that is too long shifts the columns or,
with one column asked for, goes unnoticed; a stray quote disappears. All of them take a path for a pattern
(`a[1].parquet` is not found), and write a lock file to the Hugging Face cache even with `streaming=True`.
"""

import codecs
import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.hub import data_set_files
from workbench.texts.chat import ANSWERS, LOSSES, ROWS, in_one_line

CHUNK = 1 << 20  # bytes to check, characters to read at a time
HELD_WHOLE = {".jsonl": 1 << 28, ".json": 1 << 27}  # characters: of a line, and of a file
PLAIN = (".txt", ".md", "")
OBJECTS = (".jsonl", ".json")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", "saved", ".arrow")
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, *TABLES)
KINDS = (".txt", ".md", *OBJECTS, *SEPARATORS, ".parquet")  # that are looked for in a folder
READ = f"{', '.join(KINDS)}, packed or not (.gz), or a folder"
SAVED = ("dataset_dict.json", "state.json")  # what tells a folder that `datasets` wrote
WITHOUT = {"column": PLAIN, "encoding": (*TABLES, "hub"), "loss": PLAIN, "split": FILES, "config": FILES}  # by option
HUB_ID = re.compile(r"(?=.{1,96}\Z)[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
SURROGATE = re.compile(r"[\ud800-\udfff]")
MAGIC = {b"%PDF": "PDF", b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd"}
Signature = tuple[tuple[Any, ...], ...]


def refusal(message: str) -> ConfigurationError:
    """The error that says what is wrong with a text, and what to do."""
    return ConfigurationError(f"corpus: {message}")


@dataclass(frozen=True)
class TextSource:
    """A file, a folder of files, or the files of a data set of the hub, with the column and the encoding to read.

    `loss` is empty for texts. Of conversations it says what counts, "answers" or "all"; each is a line of JSON. The hub
    was `asked` for a data set, with the arguments of `datasets.load_dataset`.
    """

    name: str
    path: Path
    column: str = "text"
    encoding: str = "utf-8-sig"
    loss: str = ""
    downloaded: tuple[Path, ...] = ()
    asked: tuple[tuple[str, str | None], ...] = ()

    def documents(self) -> Iterator[Iterable[str] | None]:
        """Every document in pieces, None for a null, in the order of the files' names; line ends are `\\n`.

        Nothing is held in memory but a piece of a plain text, or a row; of .json, the file.

        Raises:
            ConfigurationError: a file cannot be read as what it claims to be.
        """
        for path in self.files():
            texts = (text for _, text in _documents(path, self))
            if kind_of(path) in PLAIN:
                yield texts
            else:
                yield from (None if text is None else _parts(text) for text in texts)

    def place_of(self, text: str) -> str:
        """The file, and the line or row there, where a text stands first."""
        for path in self.files():
            for place, document in _documents(path, self):
                if document == text:
                    return place
        return self.name

    def files(self) -> list[Path]:
        """The path itself, what was downloaded, or what a folder holds of the known kinds, hidden files left out.

        Beside others, a .json is taken for a description of them.
        """
        if not self.is_folder:
            return list(self.downloaded or [self.path])
        files = [path for path in _visible(self.path) if kind_of(path) in KINDS]
        # an only .json is the text itself
        return [path for path in files if kind_of(path) != ".json"] or files

    @property
    def is_folder(self) -> bool:
        """A folder of texts; one that a `datasets.Dataset` was saved to counts as a file."""
        return self.path.is_dir() and not any((self.path / name).is_file() for name in SAVED)

    def others(self) -> list[Path]:
        """Files of a folder that are not read."""
        return sorted(set(_visible(self.path)) - set(self.files())) if self.is_folder else []

    def signature(self) -> Signature:
        """Names, sizes, times of change and inodes of all files: another one means that the text may be another. A time
        of writing can be set back, one of change cannot."""
        facts = []
        for path in self.files():
            for file in _visible(path) if path.is_dir() else [path]:
                try:
                    state = file.stat()
                except OSError as error:
                    _refuse(error)
                facts.append((str(file), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
        return tuple(facts)


def _parts(text: str) -> Iterable[str]:
    """A text in parts of CHUNK characters; none if it is blank."""
    return () if text.isspace() else (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


# ---- what a name means ----


def find_text(name: str, alternatives: str) -> TextSource:
    """What a name means. `alternatives` says what else could have been given, for the message.

    Raises:
        ConfigurationError: no such file, a kind that is not read, an unknown option or encoding, an empty folder; the
            hub has no such data set, or not for this user.
        UnavailableError: the hub cannot be reached, and the data set is not in the cache.
    """
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if not (location and os.path.exists(path)):
        return _of_hub(name, alternatives)
    source = TextSource(name, path)
    files = source.files()
    if not files:
        endings = sorted({other.suffix or other.name for other in source.others()})
        content = f"only {', '.join(endings[:5])}" if endings else "it is empty"
        raise refusal(f"the folder {location!r} has no text in it ({content}). Put {', '.join(KINDS)} files there.")
    for file in files:
        _check_kind(file)
    return _with_options(source, _options(name, options, {kind_of(file) for file in files}))


def split_name(name: str) -> tuple[str, str]:
    """Path, and options with their colon. A colon may be part of an existing path, and of a drive."""
    location, colon, options = name.rpartition(":")
    if os.path.exists(os.path.expanduser(location)) and not os.path.exists(os.path.expanduser(name)):
        return location, colon + options
    return name, ""


def _of_hub(name: str, alternatives: str) -> TextSource:
    repository, colon, options = name.partition(":")
    nothing = f"there is no file {name!r:.200} (looked in {Path.cwd()}), nor an embedded text"
    if not HUB_ID.fullmatch(repository) or repository.lower().endswith((*KINDS, ".gz")):  # a file's name
        raise refusal(f"{nothing}. {alternatives}")
    values = _options(name, colon + options, {"hub"})
    config = values.pop("config", None)
    split = values.pop("split", "train")
    files = data_set_files(repository, config, split, nothing)
    arguments = (("path", repository), ("name", config), ("split", split))
    return _with_options(TextSource(name, files[0], downloaded=files, asked=arguments), values)


def _options(name: str, options: str, kinds: set[str]) -> dict[str, Any]:
    """The options of a name, checked for the kinds of its files."""
    values: dict[str, Any] = {}
    for option in options[1:].split(",") if options else []:
        key, equals, value = option.partition("=")
        if not equals:
            key = "split" if "hub" in kinds else "column"
            value = option
        if key not in WITHOUT:
            raise refusal(f"{name!r}: there is no option {key!r}. Known: {', '.join(WITHOUT)}.")
        if key in values or not value:
            raise refusal(f"{name!r}: {key} is {'given twice' if value else 'empty'}. Give one {key}, or none.")
        if kinds <= set(WITHOUT[key]):  # there is no file that has it
            others = " and ".join(f"{other}=…" for other, without in WITHOUT.items() if not kinds <= set(without))
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
    """Without a column, `text` is read, or else that of conversations, if the first file has it."""
    source = replace(source, **options)
    first = source.files()[0]
    if "column" not in options:
        with suppress(Exception):  # what is wrong with the file is told when it is read
            source = replace(source, column=column_of(_columns(first, source)))
    # a field of a CSV file holds no messages, but it may hold a prompt
    if source.column in ROWS and ("," in source.column or kind_of(first) not in SEPARATORS):
        return replace(source, loss=source.loss or ANSWERS)
    if source.loss:
        raise refusal(f"{source.name!r} has texts, no conversations: of these all counts. Leave loss=… out.")
    return source


def column_of(names: Iterable[str]) -> str:
    """`text`, or else the columns of conversations, if they are among the names of a table's columns."""
    for column in ("text", *ROWS):
        if set(column.split(",")) <= set(names):
            return column
    return "text"


def _visible(folder: Path) -> list[Path]:
    """All files in a folder and the folders in it, hidden ones left out."""
    visible: list[Path] = []
    for place, folders, files in os.walk(folder, onerror=_refuse):
        # `os.walk` goes on into the folders that stay in this list
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            link = Path(place, name)
            if link.is_symlink():
                raise refusal(
                    f"{link} is a link to a folder, which is not followed. Put the folder there, or remove it."
                )
        visible += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def _check_kind(path: Path) -> None:
    if SURROGATE.search(str(path)):
        raise refusal(f"the name {str(path)!r} is not UTF-8, so that no record can hold it. Rename it.")
    if not path.is_file() and not path.is_dir():
        what = "not a regular file" if path.exists() else "a link that leads nowhere"
        raise refusal(f"{path} is {what}. Give a file with text in it.")
    # a packed table would have to be unpacked whole
    if kind_of(path) not in FILES or (path.suffix.lower() == ".gz" and kind_of(path) in TABLES):
        raise refusal(f"{path} ends in {''.join(path.suffixes[-2:])}, which is not read. Give {READ}.")


# ---- reading: these functions know nothing of the rest, and an exported script has them too ----


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
    a folder. Line ends stay as they are, but none is cut in two. Of several columns, with commas, each gives a tuple.

    Raises:
        KeyError: with the place of a row that has no such column, and the columns that it has.
        ValueError: a line or row cannot be read.
    """
    file = Path(path)
    ending = kind_of(file)
    names = column.split(",")
    rows: Iterator[tuple[int, Any]]
    if ending in OBJECTS:
        rows = objects(file, encoding, names)
    elif ending in SEPARATORS:
        rows = csv_rows(file, encoding)
    elif ending in TABLES:
        rows = enumerate(table_rows(file, names), 1)
    else:
        yield from ((1, piece) for piece in pieces(file, encoding, size))
        return
    pick = itemgetter(*names)
    for number, row in rows:
        try:
            document = pick(row)
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
    """What a JSON file holds, a line each or all in one list, each with its line or row."""
    shape = "Each must be one whole object: {" + ", ".join(f'"{name}": "…"' for name in names) + "}"
    with opened(path, encoding) as file:
        rows: Iterator[tuple[int, Any]]
        if kind_of(path) == ".json":
            rows = enumerate(json_list(path, file.read(HELD_WHOLE[".json"])), 1)
        else:
            rows = json_lines(path, file, shape)
        for number, row in rows:
            if not isinstance(row, dict):
                raise ValueError(f"{path}, {unit_of(path)} {number} is a {type(row).__name__}, not an object. {shape}")
            yield number, row


def json_list(path: Path, text: str) -> list[Any]:
    """The list that a JSON file is, or has under the name `data`."""
    try:
        data = json.loads(text)
        rows = data.get("data") if isinstance(data, dict) else data
        if not isinstance(rows, list):
            raise ValueError(f"it is a {type(data).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not JSON of rows ({error}). It must be one list of objects: [{{...}}, …]"
        ) from None
    return rows


def json_lines(path: Path, file: Any, shape: str) -> "Iterator[tuple[int, Any]]":
    """The values in the lines of a file that are not blank."""
    lines = iter(partial(file.readline, HELD_WHOLE[".jsonl"]), "")
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
    with opened(path, encoding) as file:
        rows = csv.reader(file, strict=True, delimiter=SEPARATORS[kind_of(path)])
        first = 1  # the reader itself counts only lines that it has finished
        try:
            for fields in rows:
                yield first, rows.line_num, fields
                first = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {first} is not CSV ({error}). Close every double quote; double those in a text."
            ) from None


def table_rows(path: Path, names: list[str]) -> "Iterator[Any]":
    """The rows of a Parquet file or of a data set, by column."""
    if kind_of(path) == ".parquet":
        from pyarrow.parquet import ParquetFile

        batches = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20).iter_batches(64, columns=names)
    else:
        batches = saved(path).select_columns(names).with_format("arrow").iter(64)
    for batch in batches:
        yield from batch.to_pylist()


def saved(path: Path) -> Any:
    """The data set that `datasets` wrote into a folder, or an Arrow file."""
    from datasets import Dataset, load_from_disk

    return load_from_disk(str(path)) if path.is_dir() else Dataset.from_file(str(path))


# ---- checking ----


def _documents(path: Path, source: TextSource) -> Iterator[tuple[str, Any]]:
    """The place and text of each that `read_documents` gives, checked, and with a place and a cure for every fault."""
    ending = kind_of(path)
    unit = unit_of(path)
    number = 0
    try:
        if ending not in TABLES and not _check_bytes(path, source.encoding) and ending in PLAIN:
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
        _refuse(error, path)
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
    for name in source.column.split(","):
        if name not in columns:
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
    name = source.name.rpartition(":")[0] if source.column != "text" else source.name
    option = ":"
    if source.downloaded:
        option = ",column=" if ":" in name else ":column="
    cure = f"Name one: {name}{option}{shown[0] if shown else 'COLUMN'}"
    if len(shown) == 1 and any(mark in shown[0] for mark in ";\t|"):
        cure = "The fields seem not to be separated by commas: save it with commas, or with tabs as .tsv"
    missing = [column for column in source.column.split(",") if column not in columns]
    return refusal(f"{where} has no column {missing[0]!r}; it has {', '.join(shown)}. {cure}")


def _checked(place: str, source: TextSource, text: Any) -> str | None:
    """The text with plain line ends; None for a null. A conversation is a line of JSON."""
    if source.loss:
        try:
            text = in_one_line(source.column, text)
        except ValueError as error:
            raise refusal(f'{place}: {error}. A message is {{"role": "user", "content": "…"}}.') from None
    if text is None:
        return None
    if not isinstance(text, str):
        raise refusal(
            f"{place}: {source.column!r} holds a {type(text).__name__}, not a text. Choose another column, or for "
            "conversations name it messages."
        )
    surrogate = None if text.isascii() else SURROGATE.search(text)
    if surrogate:
        raise refusal(
            f"{place}: character {surrogate.end()} is half of a surrogate pair, which no text can have. Remove it, or "
            "write the file again as UTF-8."
        )
    return text.replace("\r\n", "\n")


def _check_bytes(path: Path, encoding: str) -> bool:
    """Refuses what is no text in this encoding; whether there is more in it than white space."""
    ending = kind_of(path)
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    held = 0  # characters of the line so far, or of the file, where it is held whole
    has_text = False
    with opened(path) as file:
        begin = file.peek(4)
        for magic, name in MAGIC.items():
            if begin.startswith(magic):
                raise refusal(
                    f"{path} is not a text file: it begins like a {name} file. Unpack it, or correct its ending."
                )
        while True:
            data = file.read(CHUNK)
            if b"\0" in data and not encoding.startswith(("utf-16", "utf-32")):
                wide = begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                cure = f"It looks like UTF-16: {path}:encoding=utf-16" if wide else "Give a file with text in it."
                raise refusal(f"{path} is not a text file: it contains zero bytes. {cure}")
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeError as error:
                raise _undecodable(path, encoding, error, line) from None
            line += text.count("\n")
            has_text = has_text or bool(text and not text.isspace())
            line_end = text.rfind("\n") if ending == ".jsonl" else -1
            held = len(text) - line_end - 1 if line_end >= 0 else held + len(text)
            if held > HELD_WHOLE.get(ending, held):
                where = f"{path} has" if ending == ".json" else f"{path}, line {line} has"
                raise refusal(
                    f"{where} more than {HELD_WHOLE[ending]:,} characters. Write it as .jsonl, in more lines."
                )
            if not data:
                return has_text


def _undecodable(path: Path, encoding: str, error: UnicodeError, line: int) -> ConfigurationError:
    """`line` is the one where the bytes of the error begin."""
    name = encoding.removesuffix("-sig").upper()
    if not isinstance(error, UnicodeDecodeError):
        return refusal(f"{path} is not {name}: {error}. Name its encoding, for example {path}:encoding=utf-8")
    line += error.object.count(b"\n", 0, error.start)
    what = f"byte {error.object[error.start]:#04x} in line {line}"
    if error.reason.startswith("unexpected end"):
        return refusal(
            f"{path} ends inside a character ({what}): it was cut off, or it is not {name}. Copy it again, or name its "
            f"encoding: {path}:encoding=latin-1"
        )
    other = "latin-1" if name == "UTF-8" else "utf-8"
    if encoding == "iso8859-1":
        other = "cp1252"
    return refusal(
        f"{path} is not {name}: {what}. Name its encoding, for example {path}:encoding={other}, or convert it: iconv "
        f"-f {other.replace('latin-1', 'latin1')} -t utf-8 {path.name} > fixed{path.suffix}"
    )


def _refuse(error: OSError, path: Path | None = None) -> NoReturn:
    message = f"{path or error.filename} cannot be read: {error.strerror or error}. Check its permissions."
    raise refusal(message) from None
