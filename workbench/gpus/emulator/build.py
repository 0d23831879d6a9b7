"""Building the stub libraries for a PyTorch: what is written by hand, and one empty function for each other import.

The next release of PyTorch needs no work: which functions it wants is read from its own libraries. What is built lies
in the user's cache, under a name that changes with PyTorch's files and with the sources here.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from workbench.errors import UnavailableError
from workbench.gpus.emulator.elf import imports

SOURCES = Path(__file__).with_name("stubs")
OURS = "libemulator.so"
NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt|nvidia-ml)")
LIBRARIES = tomllib.loads((SOURCES / "libraries.toml").read_text(encoding="utf-8"))
ASKER = "libc10_cuda.so"
RUNTIME, CALLS_RUNTIME = "libcudart", ("libcuda", "libnvidia-ml", "libnccl")  # these are written on top of it
REFUSED = re.compile("|".join(LIBRARIES["refused"]))


@dataclass
class Library:
    """A library to be made: its name, and the symbols that it must have with their version."""

    name: str
    symbols: dict[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """Without the hash that a wheel puts into the name of a library that it brings along."""
        return re.sub(r"-[0-9a-f]{8}$", "", self.name.partition(".so")[0])

    @property
    def sources(self) -> list[Path]:
        return [SOURCES / f"{name}.c" for name in LIBRARIES["by_hand"].get(self.stem, ())]


def stubs(files: Iterable[Path], cache: Path) -> Path:
    """The folder of stub libraries for these shared libraries; built there if it is not yet.

    Raises:
        UnavailableError: no C compiler, or one that fails; or the libraries want another CUDA than 12 or 13.
    """
    files = sorted(files)
    folder = cache / f"stubs-{_key(files)}"
    if not (folder / OURS).is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / ".lock"), tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as aside:
            if not (folder / OURS).is_file():  # which another process may have built meanwhile
                (made := Path(aside, "stubs")).mkdir()
                _build(wanted(files), cuda_major(files), made)
                made.rename(folder)
    return folder


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def wanted(files: Iterable[Path]) -> list[Library]:
    """NVIDIA's libraries, as these files import from them."""
    files = list(files)
    asked = _asker(files)
    libraries = {
        name: Library(name, {found.decode(): "" for found in re.findall(pattern.encode(), asked)})
        for name, pattern in LIBRARIES["by_name"].items()
    }
    libraries["libcuda.so.1"].symbols |= dict.fromkeys(LIBRARIES["of_triton"], "")
    unversioned: set[str] = set()
    for found in map(imports, files):
        for name in filter(NVIDIA.match, found.needed):
            libraries.setdefault(name, Library(name))
        for symbol, owner, version in found.symbols:
            if NVIDIA.match(owner):
                libraries.setdefault(owner, Library(owner)).symbols[symbol] = version
            elif not owner:
                unversioned.add(symbol)
    for library in libraries.values():
        if pattern := LIBRARIES["unversioned"].get(library.stem):
            library.symbols |= {name: "" for name in unversioned if re.match(pattern, name)}
    return sorted(libraries.values(), key=lambda library: library.name)


def cuda_major(files: Iterable[Path]) -> int:
    """12 or 13, as one of PyTorch's libraries says. Raises UnavailableError for another CUDA."""
    found = re.search(rb"libcudart\.so\.(\d+)", _asker(files))
    if found is None or int(found[1]) not in (12, 13):
        raise UnavailableError(
            f"emulator: this PyTorch wants {found[0].decode() if found else 'no CUDA runtime'}, and only CUDA 12 and "
            "13 are emulated. Install a PyTorch that is built for one of them."
        )
    return int(found[1])


def _asker(files: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in files if path.name == ASKER)


# ---- compiling ----


def compiler() -> list[str]:
    """The command of a C compiler: `$CC`, what the machine has, or the ziglang package. Raises UnavailableError."""
    if named := os.environ.get("CC"):
        return named.split()
    if found := next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None):
        return [found]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise UnavailableError(
        "emulator: no C compiler (cc, gcc or clang) is on this machine. Install one, or one from the package index: "
        "pip install ziglang"
    )


def _build(libraries: list[Library], major: int, folder: Path) -> None:
    command = [*compiler(), "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-fno-builtin"]
    command += [f"-DCUDA_MAJOR={major}", f"-I{SOURCES}"]
    _compile([*command, str(SOURCES / "emulator.c"), f"-Wl,-soname,{OURS}", "-o", str(folder / OURS)])
    runtime = [library for library in libraries if library.stem == RUNTIME]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for some in (runtime, [library for library in libraries if library not in runtime]):
            list(pool.map(lambda library: _make(library, command, folder), some))


def _make(library: Library, command: list[str], folder: Path) -> None:
    generated, script = folder / f"{library.name}.c", folder / f"{library.name}.map"
    generated.write_text(_functions(sorted(library.symbols)))
    script.write_text(_versions(library.symbols))
    called = [str(path) for path in folder.glob(f"{RUNTIME}.so.*[0-9]") if library.stem in CALLS_RUNTIME]
    linked = [f"-Wl,-soname,{library.name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    inputs = [*map(str, library.sources), str(generated), str(folder / OURS), *called]
    versioned = [f"-Wl,--version-script={script}"] if any(library.symbols.values()) else []
    _compile([*command, *linked, *versioned, *inputs, "-o", str(folder / library.name)])


def _functions(names: Iterable[str]) -> str:
    """A macro of `stubs/stub.h` for each."""
    lines = (f"{'REFUSED' if REFUSED.match(name) else 'STUB'}({name})" for name in names)
    return "\n".join(['#include "stub.h"', *lines, ""])


def _versions(symbols: Mapping[str, str]) -> str:
    """A linker script: each version that a caller asks for, with its symbols."""
    nodes = {
        version: [f"{s};" for s, of in symbols.items() if of == version] for version in sorted({*symbols.values()})
    }
    return "".join(f"{version} {{ global: {' '.join(of)} }};\n" for version, of in nodes.items() if version)


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(
            f"emulator: {command[0]} could not build a stub library ({Path(command[-1]).name}): "
            f"{done.stderr.strip()[-600:]} Try another compiler: pip install ziglang, then CC='python -m ziglang cc'."
        )
