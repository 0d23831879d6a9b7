"""What a shared library wants of others: the libraries that it needs, and the symbols with their versions.

Read from the file itself, with numpy: the tools that could (`nm`, `readelf`) are not on every machine, and a reader in
plain Python takes 20 s for the 300,000 symbols of PyTorch. The format: https://refspecs.linuxfoundation.org/elf/gabi4+,
and for versions https://refspecs.linuxfoundation.org/LSB_5.0.0/LSB-Core-generic/LSB-Core-generic/symversion.html.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def _record(fields: str) -> np.dtype[np.void]:
    return np.dtype([(name, f"<u{size}") for name, size in (field.split(":") for field in fields.split())])


SECTION = _record("name:4 type:4 flags:8 address:8 offset:8 size:8 link:4 info:4 alignment:8 entry:8")
SYMBOL = _record("name:4 info:1 other:1 section:2 value:8 size:8")
LIBRARY = _record("of:2 count:2 name:4 first:4 next:4")
VERSION = _record("hash:4 flags:2 number:2 name:4 next:4")
DYNAMIC_SYMBOLS, DYNAMIC, VERSIONS_NEEDED, VERSION_OF_SYMBOL = 11, 6, 0x6FFFFFFE, 0x6FFFFFFF
NEEDED = 1


@dataclass(frozen=True)
class Imports:
    """Of one library: names of the libraries it needs, and of the symbols it has not: (name, library, version).

    Library and version are empty for a symbol that has no version.
    """

    needed: frozenset[str]
    symbols: frozenset[tuple[str, str, str]]


def imports(path: Path) -> Imports:
    """Raises ValueError for a file that is no shared library for 64-bit little-endian machines."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit ELF library")
        return _Library(data).imports()


class _Library:
    def __init__(self, data: mmap) -> None:
        self.data = data
        header = np.frombuffer(data[:64], "<u2")
        start, count = int(np.frombuffer(data[40:48], "<u8")[0]), int(header[30])
        self.sections = np.frombuffer(data[start : start + 64 * count], SECTION)
        self.first = {int(section["type"]): section for section in self.sections[::-1]}  # of each kind

    def imports(self) -> Imports:
        symbols = self.first.get(DYNAMIC_SYMBOLS)
        if symbols is None:
            return Imports(frozenset(), frozenset())
        table = np.frombuffer(self._content(symbols), SYMBOL)
        dynamic = np.frombuffer(self._content(self.first.get(DYNAMIC)), "<u8").reshape(-1, 2)
        names = self._content(self.sections[symbols["link"]])
        versions = self._versions(len(table))
        known = dict(self._needed_versions(names))
        wanted = np.flatnonzero((table["section"] == 0) & (table["name"] > 0))
        found = frozenset((_text(names, table["name"][i]), *known.get(int(versions[i]), ("", ""))) for i in wanted)
        return Imports(frozenset(_text(names, value) for tag, value in dynamic if tag == NEEDED), found)

    def _content(self, section: np.void | None) -> bytes:
        """Nothing where there is no such section."""
        if section is None:
            return b""
        start = int(section["offset"])
        return self.data[start : start + int(section["size"])]

    def _versions(self, count: int) -> NDArray[np.uint16]:
        """The number of each symbol's version; its highest bit says something else."""
        content = self._content(self.first.get(VERSION_OF_SYMBOL)) or bytes(2 * count)
        return np.frombuffer(content, np.uint16) & np.uint16(0x7FFF)

    def _needed_versions(self, names: bytes) -> Iterator[tuple[int, tuple[str, str]]]:
        """(number, (library, version)): a chain of libraries, each with a chain of versions."""
        content, at = self._content(self.first.get(VERSIONS_NEEDED)), 0
        while at < len(content):
            library = np.frombuffer(content, LIBRARY, count=1, offset=at)[0]
            place = at + int(library["first"])
            for _ in range(library["count"]):
                version = np.frombuffer(content, VERSION, count=1, offset=place)[0]
                yield int(version["number"]), (_text(names, library["name"]), _text(names, version["name"]))
                place += int(version["next"])
            at += int(library["next"]) or len(content)  # the last one says 0


def _text(names: bytes, start: int) -> str:
    return names[int(start) : names.index(b"\0", int(start))].decode()
