"""The imports of a shared library: the libraries that it needs, and the symbols with their versions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Imports:
    """The imports of one library.

    Attributes:
        libraries: the names of the libraries that it needs.
        symbols: (name, library, version) of each symbol that it takes from another library; both are empty for a symbol
            that has no version.
    """

    libraries: frozenset[str]
    symbols: frozenset[tuple[str, str, str]]


def read_imports(path: Path) -> Imports:
    """Read the imports of a shared library. Raises elftools' ELFError for another file."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        sections = {section["sh_type"]: section for section in ELFFile(file).iter_sections()}
        libraries = frozenset(tag.needed for tag in sections["SHT_DYNAMIC"].iter_tags("DT_NEEDED"))
        versions = {}  # the key is the number of a version in this file
        if "SHT_GNU_verneed" in sections:
            for library, wanted in sections["SHT_GNU_verneed"].iter_versions():
                for version in wanted:
                    versions[version["vna_other"]] = (library.name, version.name)
        table = sections["SHT_DYNSYM"]
        numbers = sections.get("SHT_GNU_versym")
        symbols = set()
        for i in range(1, _first_defined(sections)):
            symbol = table.get_symbol(i)
            if symbol["st_shndx"] == "SHN_UNDEF":
                number = numbers.get_symbol(i)["ndx"] if numbers else None
                symbols.add((symbol.name, *versions.get(number, ("", ""))))
        return Imports(libraries, frozenset(symbols))


def _first_defined(sections: dict[str, Any]) -> int:
    """Return the number of the first symbol that the library defines: those it imports stand before.

    The hash table of the symbols that it defines, of which PyTorch has 300,000, says where they begin. An empty table
    says 1 (`symoffset`, https://flapenguin.me/elf-dt-gnu-hash).
    """
    begin = sections["SHT_GNU_HASH"].params["symoffset"] if "SHT_GNU_HASH" in sections else 1
    return begin if begin > 1 else sections["SHT_DYNSYM"].num_symbols()
