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
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from workbench.errors import ConfigurationError, in_a_line
from workbench.hub import data_set_files
from workbench.texts.chat import ANSWERS, LOSSES, ROWS, in_one_line

CHUNK = 1 << 20  # bytes to check, characters to read at a time
HELD_WHOLE = {".jsonl": 1 << 28, ".json": 1 << 27}  # characters: of a line, and of a file
Signature = tuple[tuple[Any, ...], ...]
KINDS = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
PLAIN, OBJECTS, SEPARATORS = (".txt", ".md", ""), (".jsonl", ".json"), {".csv": ",", ".tsv": "\t"}
TABLES = (".parquet", "saved", ".arrow")
SAVED = ("dataset_dict.json", "state.json")  # what tells a folder that `datasets` wrote
READ = f"{', '.join(KINDS)}, packed or not (.gz), or a folder"
FILES = (*PLAIN, *OBJECTS, *SEPARATORS, *TABLES)
WITHOUT = {"column": PLAIN, "encoding": (*TABLES, "hub"), "loss": PLAIN, "split": FILES, "config": FILES}  # by option
HUB_ID = re.compile(r"(?=.{1,96}\Z)[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
SURROGATE = re.compile(r"[\ud800-\udfff]")
MAGIC = {b"%PDF": "PDF", b"PK\3\4": "zip", b"\x1f\x8b": "gzip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd"}


def refusal(words: str) -> ConfigurationError:
    """The error that says what is wrong with a text, and what to do."""
    return ConfigurationError(f"corpus: {words}")


def kind_of(path: Path) -> str:
    """The ending in small letters, without .gz; of a folder, "saved": a `datasets.Dataset` was saved there."""
    inner = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return "saved" if path.is_dir() else inner.suffix.lower()


def opened(path: Path, encoding: str | None = None) -> Any:
    """The file for reading bytes or, in an encoding, text; a .gz is unpacked as it is read."""
    mode, newline = ("rt", "\n") if encoding else ("rb", None)
    return (gzip.open if path.suffix.lower() == ".gz" else Path.open)(path, mode, encoding=encoding, newline=newline)


def objects(file: Any, kind: str) -> "Iterator[tuple[int, Any]]":
    """What a JSON file holds, a line each or all in one list, each with its line or row."""
    if kind == ".jsonl":
        lines = iter(lambda: file.readline(HELD_WHOLE[kind]), "")
        return ((number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip())
    data = json.loads(file.read(HELD_WHOLE[kind]))
    rows = data.get("data") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise ValueError(f"it is a {type(data).__name__}")
    return iter(enumerate(rows, 1))


def read_documents(
    path: str, column: str = "text", encoding: str = "utf-8-sig", size: int = -1
) -> "Iterator[tuple[int, Any]]":
    """The documents of one file that has been checked, each with the line or row where it ends; a null is None.

    A file of plain text is one document, given in pieces of `size` characters (-1: in one piece). A saved data set is
    a folder. Line ends stay as they are, but none is cut in two. Of several columns, with commas, each gives a tuple.
    """
    kind, names = kind_of(Path(path)), column.split(",")
    pick, place = itemgetter(*names), Path(path)
    if kind in (".parquet", "saved", ".arrow"):
        if kind == ".parquet":
            from pyarrow.parquet import ParquetFile

            batches = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20).iter_batches(64, columns=names)
        else:
            from datasets import Dataset, load_from_disk

            saved = load_from_disk(path) if kind == "saved" else Dataset.from_file(path)
            batches = saved.select_columns(names).with_format("arrow").iter(64)
        yield from enumerate((pick(row) for batch in batches for row in batch.to_pylist()), 1)
        return
    with opened(place, encoding) as file:
        if kind in (".jsonl", ".json"):
            yield from ((number, pick(row)) for number, row in objects(file, kind))
        elif kind in (".csv", ".tsv"):
            csv.field_size_limit(2**26)  # characters, of four bytes meanwhile; the module's own limit is 131,072
            rows = csv.reader(file, strict=True, delimiter="\t" if kind == ".tsv" else ",")
            header = next(rows)
            for row in filter(None, rows):
                if len(row) != len(header):
                    raise ValueError(f"{len(row)} fields, but the header has {len(header)}")
                yield rows.line_num, pick(dict(zip(header, row, strict=True)))
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
            yield from [texts] if kind_of(path) in PLAIN else (None if text is None else _parts(text) for text in texts)

    def place_of(self, text: str) -> str:
        """The file, and the line or row there, where a text stands first."""
        return next(place for path in self.files() for place, found in _documents(path, self) if found == text)

    def files(self) -> list[Path]:
        """The path itself, what was downloaded, or what a folder holds of the known kinds, hidden files left out.

        Beside others, a .json is taken for a description of them.
        """
        if not self.is_folder:
            return [*(self.downloaded or (self.path,))]
        known = [path for path in _visible(self.path) if kind_of(path) in KINDS]
        return [path for path in known if kind_of(path) != ".json"] or known

    @property
    def is_folder(self) -> bool:
        """A folder of texts; one that a `datasets.Dataset` was saved to counts as a file."""
        return self.path.is_dir() and not any((self.path / name).is_file() for name in SAVED)

    def others(self) -> list[Path]:
        """Files of a folder that are not read."""
        return sorted({*_visible(self.path)} - {*self.files()}) if self.is_folder else []

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
        ConfigurationError: no such file, a kind that is not read, an unknown option or encoding, an empty folder; the
            hub has no such data set, or not for this user.
        UnavailableError: the hub cannot be reached, and the data set is not in the cache.
    """
    location, options = split_name(name)
    path = Path(os.path.expanduser(location))
    if not (location and os.path.exists(path)):
        repository, colon, options = name.partition(":")
        nothing = f"there is no file {name!r:.200} (looked in {Path.cwd()}), nor an embedded text"
        if not HUB_ID.fullmatch(repository) or {kind_of(Path(repository)), Path(repository).suffix} & {*KINDS, ".gz"}:
            raise refusal(f"{nothing}. {alternatives}")
        given = _options(name, colon + options, {"hub"})
        asked = ("path", repository), ("name", given.pop("config", None)), ("split", given.pop("split", "train"))
        files = data_set_files(*dict(asked).values(), nothing)
        return _resolved(TextSource(name, files[0], downloaded=files, asked=asked), given)
    source = TextSource(name, path)
    if not (known := source.files()):
        held = sorted({other.suffix or other.name for other in source.others()})
        words = f"only {', '.join(held[:5])}" if held else "it is empty"
        raise refusal(f"the folder {location!r} has no text in it ({words}). Put {', '.join(KINDS)} files there.")
    for file in known:
        _check_kind(file)
    return _resolved(source, _options(name, options, {kind_of(file) for file in known}))


def _resolved(source: TextSource, given: dict[str, Any]) -> TextSource:
    """With the options; without a column, `text` or else that of conversations, if the first file has it."""
    source = replace(source, **given)
    first = source.files()[0]
    if "column" not in given:
        with suppress(Exception):  # what is wrong with the file is told when it is read
            source = replace(source, column=column_of(_columns(first, source)))
    if source.column not in ROWS or ("," not in source.column and kind_of(first) in SEPARATORS):
        if source.loss:
            raise refusal(f"{source.name!r} has texts, no conversations: of these all counts. Leave loss=… out.")
        return source
    return replace(source, loss=source.loss or ANSWERS)


def column_of(names: Iterable[str]) -> str:
    """`text`, or else the columns of conversations, if they are among the names of a table's columns."""
    return next((column for column in ("text", *ROWS) if {*column.split(",")} <= {*names}), "text")


def split_name(name: str) -> tuple[str, str]:
    """Path, and options with their colon. A colon may be part of an existing path, and of a drive."""
    location, colon, options = name.rpartition(":")
    named, found = (os.path.exists(os.path.expanduser(path)) for path in (name, location))
    return (location, colon + options) if found and not named else (name, "")


def _options(name: str, options: str, kinds: set[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options[1:].split(",") if options else ():
        key, value = option.split("=", 1) if "=" in option else ("split" if "hub" in kinds else "column", option)
        if key not in WITHOUT:
            raise refusal(f"{name!r}: there is no option {key!r}. Known: {', '.join(WITHOUT)}.")
        if key in found or not value:
            raise refusal(f"{name!r}: {key} is {'given twice' if value else 'empty'}. Give one {key}, or none.")
        if kinds <= {*WITHOUT[key]}:
            others = " and ".join(f"{other}=…" for other, without in WITHOUT.items() if not kinds <= {*without})
            what = f"{min(kinds) or 'plain text'} has no {key}, only {others} can be given"
            raise refusal(f"{name!r}: {what}. Leave {option!r} out.")
        if key == "loss" and value not in LOSSES:
            raise refusal(f"{name!r}: there is no loss {value!r}. Known: {', '.join(LOSSES)}.")
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


def _check_kind(path: Path) -> None:
    if SURROGATE.search(str(path)):
        raise refusal(f"the name {str(path)!r} is not UTF-8, so that no record can hold it. Rename it.")
    if not path.is_file() and not path.is_dir():
        what = "a link that leads nowhere" if not path.exists() else "not a regular file"
        raise refusal(f"{path} is {what}. Give a file with text in it.")
    if kind_of(path) not in FILES or (path.suffix.lower() == ".gz" and kind_of(path) in TABLES):
        raise refusal(f"{path} ends in {''.join(path.suffixes[-2:])}, which is not read. Give {READ}.")


def _documents(path: Path, source: TextSource) -> Iterator[tuple[str, Any]]:
    """The place and text of each that `read_documents` gives, checked, and with a place and a cure for every fault."""
    kind, number = kind_of(path), 0
    unit = "row" if kind in (*TABLES, ".json") else "line"
    try:
        if kind not in TABLES and not _check_bytes(path, source.encoding) and kind in PLAIN:
            return
        header = number = _check_columns(path, source)
        for number, text in read_documents(str(path), source.column, source.encoding, CHUNK):
            place = f"{path}, {unit} {number}"
            yield place, _checked(place, source, text)
    except ConfigurationError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, RuntimeError, csv.Error) as error:
        raise _fault(path, source, number, error) from None
    if number == header > 0:
        raise refusal(f"{path} is empty: it has a header, but no rows. Give a file with rows.")


def _check_columns(path: Path, source: TextSource) -> int:
    """Refuses a file without the column where that is known before its rows; the lines of a CSV header, or 0."""
    if kind_of(path) in (*OBJECTS, *PLAIN):
        return 0
    columns = _columns(path, source)
    if not columns and kind_of(path) in SEPARATORS:
        raise refusal(f"{path} is empty. Give a file with a header and rows.")
    for name in source.column.split(","):
        if name not in columns:
            raise _no_column(str(path), source, columns)
        if columns.count(name) > 1:
            raise refusal(f"{path} has two columns {name!r}. Rename one of them.")
    return "".join(["\n", *columns]).count("\n") if kind_of(path) in SEPARATORS else 0


def _columns(path: Path, source: TextSource) -> list[str]:
    """The names of a table's columns; of objects, those that the first has."""
    kind = kind_of(path)
    if kind in (*OBJECTS, *SEPARATORS):
        with opened(path, source.encoding) as file:
            if kind in OBJECTS:
                return [*next(objects(file, kind))[1]]
            return next(csv.reader(file, strict=True, delimiter=SEPARATORS[kind]), [])
    if kind == ".parquet":
        from pyarrow.parquet import read_schema

        return list(read_schema(path).names)
    from datasets import Dataset, DatasetDict, load_from_disk

    saved = load_from_disk(str(path)) if kind == "saved" else Dataset.from_file(str(path))
    if isinstance(saved, DatasetDict):
        first = path / next(iter(saved), "train")
        raise refusal(f"{path} holds the splits {', '.join(saved)}. Give one: {first}")
    return list(saved.column_names)


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
        cure = "Choose another column, or for conversations name it messages."
        raise refusal(f"{place}: {source.column!r} holds a {type(text).__name__}, not a text. {cure}")
    if not text.isascii() and (found := SURROGATE.search(text)):
        half = f"character {found.end()} is half of a surrogate pair, which no text can have"
        raise refusal(f"{place}: {half}. Remove it, or write the file again as UTF-8.")
    return text.replace("\r\n", "\n")


# ---- what is wrong, and where ----


def _check_bytes(path: Path, encoding: str) -> bool:
    """Refuses what is no text in this encoding; whether there is more in it than white space."""
    decoder, line, data, shown = codecs.getincrementaldecoder(encoding)(), 1, b"begin", False
    kind, held = kind_of(path), 0
    with opened(path) as file:
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
            cut = text.rfind("\n") + 1 if kind == ".jsonl" else 0
            held = len(text) - cut + (0 if cut else held)
            if held > HELD_WHOLE.get(kind, held):
                where = f"{path} has" if kind == ".json" else f"{path}, line {line} has"
                raise refusal(f"{where} more than {HELD_WHOLE[kind]:,} characters. Write it as .jsonl, in more lines.")
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
    plain += f"{',' if ':' in plain else ':'}column=" if source.downloaded else ":"
    cure = f"Name one: {plain}{next(iter(found), 'COLUMN')}"
    if len(found) == 1 and any(mark in found[0] for mark in ";\t|"):
        cure = "The fields seem not to be separated by commas: save it with commas, or with tabs as .tsv"
    missing = next(name for name in source.column.split(",") if name not in columns)
    return refusal(f"{where} has no column {missing!r}; it has {', '.join(found)}. {cure}")


def _refuse(error: OSError, path: Path | None = None) -> NoReturn:
    words = f"{path or error.filename} cannot be read: {error.strerror or error}. Check its permissions."
    raise refusal(words) from None


def _fault(path: Path, source: TextSource, after: int, error: Exception) -> ConfigurationError:
    """What stopped the reading after line `after`; in lines, it was the next one that is not blank."""
    kind, words = kind_of(path), getattr(error, "msg", "") or in_a_line(error)
    words = "nested too deeply" if isinstance(error, RecursionError) else words
    shape = f"""Each must be one whole object: {{"{'": "…", "'.join(source.column.split(","))}": "…"}}"""
    if kind in ("saved", ".arrow"):
        return refusal(f"the data set saved in {path} is empty or damaged ({error}). Save it again.")
    if kind in TABLES:
        return refusal(f"{path} is not a whole Parquet file ({words}). Write or copy it again.")
    if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
        return refusal(f"{path} is not a whole gzip file ({words}). Copy or pack it again.")
    if isinstance(error, OSError):
        _refuse(error, path)
    if kind in OBJECTS and isinstance(error, KeyError | TypeError):
        with opened(path, source.encoding) as file:
            number, row = next(found for found in objects(file, kind) if found[0] > after)
        where = f"{path}, {'line' if kind == '.jsonl' else 'row'} {number}"
        if isinstance(error, KeyError):
            return _no_column(where, source, row)
        return refusal(f"{where} is a {type(row).__name__}, not an object. {shape}")
    if kind == ".json":
        return refusal(f"{path} is not JSON of rows ({error}). It must be one list of objects: [{{...}}, …]")
    blank = "\r\n" if kind in SEPARATORS else None  # a CSV row may be a space
    with opened(path, source.encoding) as file:
        where = f"{path}, line {next(n for n, line in enumerate(file, 1) if n > after and line.strip(blank))}"
    if isinstance(error, csv.Error):
        return refusal(f"{where} is not CSV ({error}). Close every double quote; double those in a text.")
    if kind in SEPARATORS:
        cure = "Put text with a separator, a quote or a line end in it into double quotes."
        return refusal(f"{where} has {error}. {cure}")
    return refusal(f"{where} is not JSON ({words}). {shape}")
