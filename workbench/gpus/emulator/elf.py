"""What a shared library wants of others: the libraries that it needs, and the symbols with their versions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Imports:
    """Of one library: names of the libraries it needs, and of the symbols it has not: (name, library, version).

    Library and version are empty for a symbol that has no version.
    """

    needed: frozenset[str]
    symbols: frozenset[tuple[str, str, str]]


def imports(path: Path) -> Imports:
    """Raises elftools' ELFError for a file that is no shared library."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        sections = {section["sh_type"]: section for section in ELFFile(file).iter_sections()}
        needed = frozenset(tag.needed for tag in sections["SHT_DYNAMIC"].iter_tags("DT_NEEDED"))
        versions = {}  # by their numbers in this file
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
        return Imports(needed, frozenset(symbols))


def _first_defined(sections: dict[str, Any]) -> int:
    """The hash table has what the library defines, and so begins behind what it wants: PyTorch defines 300,000 symbols.
    An empty one says 1 (`symoffset`, https://flapenguin.me/elf-dt-gnu-hash)."""
    begin = sections["SHT_GNU_HASH"].params["symoffset"] if "SHT_GNU_HASH" in sections else 1
    return begin if begin > 1 else sections["SHT_DYNSYM"].num_symbols()
