"""Checks that bytes are a text in UTF-8, in what a byte-order mark states, or in the encoding that was named.

No encoding is guessed: nearly every byte is a letter in some encoding, so that a wrong guess trains on wrong letters.
"""

import codecs
import json
import math
import re
from contextlib import suppress
from pathlib import Path

from workbench.base.errors import ConfigurationError
from workbench.texts.faults import refusal
from workbench.texts.files import PLAIN, kind_of, open_file

MAGIC = {
    b"%PDF": "PDF",
    b"PK\3\4": "zip",
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
}
# In the order of these, because the mark of UTF-32 begins with that of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
MARKUP = re.compile(r"\s*<(!doctype html|html|\?xml)\b", re.IGNORECASE)  # the beginning of a page, or of XML
JSON = re.compile(r'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:')  # the beginning of JSON
UTF8_LETTERS = 3  # fewer letters may be UTF-8 by chance


def encoding_of(path: Path, named: str) -> str:
    """Return the encoding that was named, or else what a byte-order mark states, or else UTF-8."""
    if named:
        return named
    with open_file(path) as file:
        begin = file.peek(4)
    for mark, encoding in MARKS.items():
        if begin.startswith(mark):
            return encoding
    return "utf-8-sig"


def check_bytes(path: Path, encoding: str, chunk: int, most: float = math.inf) -> bool:
    """Check that a file is a text in this encoding, and return whether it has more than white space in it.

    Args:
        chunk: the bytes to read at a time.
        most: about how many bytes are checked.

    Raises:
        ConfigurationError: it is not, and the message names the line; or it is a page, XML or, for a plain text, JSON.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    has_text = False
    returns = 0
    with open_file(path) as file:
        _check_begin(path, file.peek(64))
        while True:
            data = file.read(chunk)
            if b"\0" in data and not encoding.startswith(("utf-16", "utf-32")):
                raise refusal(
                    f"{path} is not a text file in {_title(encoding)}: it contains zero bytes. Give a file with text "
                    f"in it, or name its encoding, for example {path}:encoding=utf-16-le"
                )
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeError as error:
                raise _decoding_error(path, encoding, error, line) from None
            if not has_text:
                _check_text(path, text)
            _check_named(path, encoding, data)
            line += text.count("\n")
            returns += text.rstrip().count("\r")
            has_text = has_text or bool(text and not text.isspace())
            most -= len(data)
            if not data or most <= 0:
                break
    if returns and line == 1 and most > 0:
        raise refusal(
            f"{path} has {returns} carriage returns and no line end: so old Macs ended lines. "
            f"Convert it: tr '\\r' '\\n' < {path.name} > fixed{path.suffix}"
        )
    return has_text


def _check_begin(path: Path, begin: bytes) -> None:
    """Refuse a file that begins like one of another kind."""
    for magic, name in MAGIC.items():
        if begin.startswith(magic):
            raise refusal(f"{path} is not a text file: it begins like a {name} file. Unpack it, or correct its ending.")


def _check_text(path: Path, begin: str) -> None:
    """Refuse a file that begins like a page or XML, and a plain text that begins like JSON."""
    if MARKUP.match(begin):
        raise refusal(f"{path} is a page of HTML, or XML. Save the text itself.")
    if kind_of(path) in PLAIN and (JSON.match(begin) or _is_list(begin)):
        raise refusal(f"{path} is JSON, not a plain text. If it holds examples, name it .jsonl or .json.")


def _is_list(text: str) -> bool:
    """Whether a text is a list of JSON."""
    with suppress(ValueError, RecursionError):
        return text.lstrip().startswith("[") and isinstance(json.loads(text), list)
    return False


def _check_named(path: Path, encoding: str, data: bytes) -> None:
    """Refuse an encoding in which UTF-8 can be read, but as other letters than were meant."""
    if encoding.startswith(("utf", "ascii")) or data.isascii():
        return
    if data.startswith(codecs.BOM_UTF8):
        raise refusal(f"{path} is UTF-8, as the mark at its beginning states, not {encoding}. Leave encoding out.")
    decoder = codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError):
        letters = [letter for letter in decoder.decode(data) if not letter.isascii()]
        if len(letters) >= UTF8_LETTERS:
            raise refusal(f"{path} is UTF-8, not {encoding}: its letters would become others. Leave encoding out.")


def _title(encoding: str) -> str:
    return encoding.removesuffix("-sig").upper()


def _decoding_error(path: Path, encoding: str, error: UnicodeError, line: int) -> ConfigurationError:
    """Make the error about a byte that cannot be decoded.

    Args:
        line: the line in which the decoded bytes begin.
    """
    what = str(error)
    if isinstance(error, UnicodeDecodeError):
        line += error.object.count(b"\n", 0, error.start)
        what = f"byte {error.object[error.start]:#04x} in line {line}"
        if error.reason.startswith("unexpected end"):
            what += ", where it ends inside a character: was it cut off?"
    if _title(encoding) != "UTF-8":
        return refusal(f"{path} is not {_title(encoding)} ({what}). Name its encoding, such as {path}:encoding=utf-8")
    return refusal(
        f"{path} is not UTF-8 ({what}). Name its encoding, such as {path}:encoding=cp1252, or convert it: "
        f"iconv -f cp1252 -t utf-8 {path.name.removesuffix('.gz')} > fixed{kind_of(path)}"
    )
