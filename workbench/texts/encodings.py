"""Bytes that are no text in the encoding that they are said to have, and which one they have."""

import codecs
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from charset_normalizer import from_bytes

from workbench.base.errors import ConfigurationError
from workbench.texts.faults import refusal
from workbench.texts.files import opened
from workbench.texts.folders import LFS

MAGIC = {
    b"%PDF": "PDF",
    b"PK\3\4": "zip",
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
}
SAMPLE = 1 << 22  # bytes to guess an encoding from
ENOUGH = 3  # letters that are UTF-8 by chance are fewer
MANY = 12  # bytes to tell a language by
LATIN = ["cp1252", "cp1250", "cp1254", "iso8859_2"]
OF_FEW_LETTERS = ["cp1251", "koi8_r", "cp866", "cp1253", "cp1255", "cp1256", "cp874"]
OF_MANY = ["gb18030", "big5", "cp932", "euc_jp", "cp949"]
WESTERN = "äöüßÄÖÜàáâãåæçèéêëìíîïñòóôõøùúûœÀÁÅÇÉØÑ«»“”„‘’‚–—…•€£§°ºª´¿¡·©®™\xa0"
MOSTLY = 0.95  # of the letters that are not ASCII
SELDOM = 0.01  # of the bytes: fewer are no language with letters of its own
AS_GOOD = 0.005  # of charset_normalizer's measure of chaos
CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")  # in Latin-1; in cp1252 dashes and quotes


def check_bytes(path: Path, encoding: str, chunk: int) -> bool:
    """Refuses what is no text in this encoding; whether there is more in it than white space.

    Args:
        chunk: bytes to look at together.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    has_text = False
    returns = 0
    with opened(path) as file:
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
                raise _undecodable(path, encoding, error, line) from None
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
    for magic, name in MAGIC.items():
        if begin.startswith(magic):
            raise refusal(f"{path} is not a text file: it begins like a {name} file. Unpack it, or correct its ending.")
    if begin.startswith(LFS):
        raise refusal(f"{path} is a pointer of Git LFS, without the text itself. Run: git lfs pull")


def _check_named(path: Path, encoding: str, data: bytes, text: str, line: int) -> None:
    """Refuses an encoding in which the bytes can be read, and are not meant."""
    if encoding.startswith(("utf", "ascii")) or data.isascii():
        return
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError):
        letters = [letter for letter in decoder.decode(data) if not letter.isascii()]
        if len(letters) >= ENOUGH:
            raise refusal(f"{path} is UTF-8, not {encoding}: its letters would become others. Leave encoding out.")
    control = CONTROLS.search(text) if encoding == "iso8859-1" else None
    if control:
        line += text.count("\n", 0, control.start())
        raise refusal(
            f"{path} is not Latin-1: byte {ord(control[0]):#04x} in line {line} is a control "
            f"character there. Name its encoding: {path}:encoding={guess_encoding(path)}"
        )


def guess_encoding(path: Path, also: bytes = b"") -> str:
    """The likeliest encoding of a file that is not UTF-8, by its beginning and other bytes of it."""
    with opened(path) as file:
        sample: bytes = file.read(SAMPLE) + also
    if sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even_zeros = sample[::2].count(0)
    odd_zeros = sample[1::2].count(0)
    if max(even_zeros, odd_zeros) > 4 * min(even_zeros, odd_zeros):  # most of the text is ASCII
        return "utf-16-le" if odd_zeros > even_zeros else "utf-16-be"
    high = sum(byte >= 0x80 for byte in sample)
    matches = from_bytes(sample[: 1 << 16], cp_isolation=[*LATIN, *OF_FEW_LETTERS, *OF_MANY]) if high >= MANY else None
    best = matches.best() if matches else None
    if not matches or not best or (best.encoding in LATIN and high < SELDOM * len(sample)):
        return "cp1252"  # of which what is said to be Latin-1 is a part
    text = sample.decode("cp1252", errors="replace")
    letters = [letter for letter in text if not letter.isascii()]
    if best.encoding in LATIN and sum(letter in WESTERN for letter in letters) >= MOSTLY * len(letters):
        for match in matches:
            if "cp1252" in match.could_be_from_charset and match.chaos <= best.chaos + AS_GOOD:
                return "cp1252"
    return best.encoding


def _undecodable(path: Path, encoding: str, error: UnicodeError, line: int) -> ConfigurationError:
    """`line` is the one where the bytes of the error begin."""
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
