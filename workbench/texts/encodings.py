"""Checks that bytes are a text in the given encoding, and a guess at the encoding that they have."""

import codecs
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from charset_normalizer import from_bytes

from workbench.base.errors import ConfigurationError
from workbench.texts.faults import refusal
from workbench.texts.files import open_file
from workbench.texts.folders import LFS

MAGIC = {
    b"%PDF": "PDF",
    b"PK\3\4": "zip",
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
}
SAMPLE = 1 << 22  # bytes to guess an encoding from
UTF8_LETTERS = 3  # fewer letters may be UTF-8 by chance
ENOUGH_BYTES = 12  # bytes beyond ASCII by which a language can be told
LATIN = ["cp1252", "cp1250", "cp1254", "iso8859_2"]
# Encodings of alphabets other than the Latin one, and of Chinese, Japanese and Korean.
FEW_LETTERS = ["cp1251", "koi8_r", "cp866", "cp1253", "cp1255", "cp1256", "cp874"]
MANY_LETTERS = ["gb18030", "big5", "cp932", "euc_jp", "cp949"]
WESTERN = "äöüßÄÖÜàáâãåæçèéêëìíîïñòóôõøùúûœÀÁÅÇÉØÑ«»“”„‘’‚–—…•€£§°ºª´¿¡·©®™\xa0"
WESTERN_SHARE = 0.95  # the share of WESTERN in the letters beyond ASCII from which a text is Western
HIGH_SHARE = 0.01  # the share of bytes beyond ASCII from which a language has letters of its own
CHAOS_TOLERANCE = 0.005  # a difference in charset_normalizer's measure of chaos that decides nothing
CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")  # control characters in Latin-1; dashes and quotes in cp1252


def check_bytes(path: Path, encoding: str, chunk: int) -> bool:
    """Check that a file is a text in this encoding, and return whether it has more than white space in it.

    Args:
        chunk: the bytes to read at a time.

    Raises:
        ConfigurationError: it is not. The message names the line and the likely encoding.
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
                guess = guess_encoding(path)
                cure = "Give a file with text in it."
                if guess.startswith("utf-16"):
                    cure = f"It looks like UTF-16: {path}:encoding={guess}"
                raise refusal(f"{path} is not a text file: it contains zero bytes. {cure}")
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeError as error:
                raise _decoding_error(path, encoding, error, line) from None
            _check_named(path, encoding, data, text, line)
            line += text.count("\n")
            returns += text.rstrip().count("\r")
            has_text = has_text or bool(text and not text.isspace())
            if not data:
                break
    if returns and line == 1:
        raise refusal(
            f"{path} has {returns} carriage returns and no line end: so old Macs ended lines. "
            f"Convert it: tr '\\r' '\\n' < {path.name} > fixed{path.suffix}"
        )
    return has_text


def _check_begin(path: Path, begin: bytes) -> None:
    """Refuse a file that begins like one of another kind, or like a pointer of Git LFS."""
    for magic, name in MAGIC.items():
        if begin.startswith(magic):
            raise refusal(f"{path} is not a text file: it begins like a {name} file. Unpack it, or correct its ending.")
    if begin.startswith(LFS):
        raise refusal(f"{path} is a pointer of Git LFS, without the text itself. Run: git lfs pull")


def _check_named(path: Path, encoding: str, data: bytes, text: str, line: int) -> None:
    """Refuse an encoding in which the bytes can be read, but as other letters than were meant.

    Args:
        line: the line in which `data` begins.
    """
    if encoding.startswith(("utf", "ascii")) or data.isascii():
        return
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError):
        letters = [letter for letter in decoder.decode(data) if not letter.isascii()]
        if len(letters) >= UTF8_LETTERS:
            raise refusal(f"{path} is UTF-8, not {encoding}: its letters would become others. Leave encoding out.")
    control = CONTROLS.search(text) if encoding == "iso8859-1" else None
    if control:
        line += text.count("\n", 0, control.start())
        raise refusal(
            f"{path} is not Latin-1: byte {ord(control[0]):#04x} in line {line} is a control "
            f"character there. Name its encoding: {path}:encoding={guess_encoding(path)}"
        )


def guess_encoding(path: Path, also: bytes = b"") -> str:
    """Guess the encoding of a file that is not UTF-8, by its beginning and by other bytes of it, `also`."""
    with open_file(path) as file:
        sample: bytes = file.read(SAMPLE) + also
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even_zeros = sample[::2].count(0)
    odd_zeros = sample[1::2].count(0)
    if max(even_zeros, odd_zeros) > 4 * min(even_zeros, odd_zeros):  # most of the text is ASCII
        return "utf-16-le" if odd_zeros > even_zeros else "utf-16-be"
    high = sum(byte >= 0x80 for byte in sample)
    matches = None
    if high >= ENOUGH_BYTES:
        matches = from_bytes(sample[: 1 << 16], cp_isolation=[*LATIN, *FEW_LETTERS, *MANY_LETTERS])
    best = matches.best() if matches else None
    if not matches or not best or (best.encoding in LATIN and high < HIGH_SHARE * len(sample)):
        return "cp1252"  # it has Latin-1's letters too
    text = sample.decode("cp1252", errors="replace")
    letters = [letter for letter in text if not letter.isascii()]
    if best.encoding in LATIN and sum(letter in WESTERN for letter in letters) >= WESTERN_SHARE * len(letters):
        for match in matches:
            if "cp1252" in match.could_be_from_charset and match.chaos <= best.chaos + CHAOS_TOLERANCE:
                return "cp1252"
    return best.encoding


def _decoding_error(path: Path, encoding: str, error: UnicodeError, line: int) -> ConfigurationError:
    """Make the error about a byte that cannot be decoded.

    Args:
        line: the line in which the decoded bytes begin.
    """
    name = encoding.removesuffix("-sig").upper()
    if not isinstance(error, UnicodeDecodeError):
        return refusal(f"{path} is not {name}: {error}. Name its encoding, for example {path}:encoding=utf-8")
    line += error.object.count(b"\n", 0, error.start)
    what = f"byte {error.object[error.start]:#04x} in line {line}"
    guess = guess_encoding(path, error.object) if name == "UTF-8" else "utf-8"
    if error.reason.startswith("unexpected end"):
        return refusal(
            f"{path} ends inside a character ({what}): it was cut off, or it is not {name}. Copy "
            f"it again, or name its encoding: {path}:encoding={guess}"
        )
    return refusal(
        f"{path} is not {name}: {what}. It may be {guess}: name that, {path}:encoding={guess}, or "
        f"convert it: iconv -f {guess} -t utf-8 {path.name} > fixed{path.suffix}"
    )
