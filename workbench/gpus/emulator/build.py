"""The build of the stub libraries for a PyTorch: functions written by hand, and an empty one for each other import.

The next release of PyTorch needs no work: its own libraries say which functions they want. The stubs lie in the user's
cache, in a folder whose name changes with PyTorch's files and with the sources here.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from workbench.base.errors import UnavailableError
from workbench.gpus.emulator.elf import read_imports

SOURCES = Path(__file__).with_name("stubs")
OURS = "libemulator.so"  # the library that keeps the books, which all others call
NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt|nvidia-ml)")
LIBRARIES = tomllib.loads((SOURCES / "libraries.toml").read_text(encoding="utf-8"))
ASKER = "libc10_cuda.so"  # the library of PyTorch that names CUDA's version, and asks for functions by name
RUNTIME = "libcudart"
CALLS_RUNTIME = ("libcuda", "libnvidia-ml", "libnccl")  # libraries that are written on top of CUDA's runtime
REFUSED = re.compile("|".join(LIBRARIES["refused"]))


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """Return the key of each name, of a table that lists names by key."""
    keys: dict[str, str] = {}
    for key, names in table.items():
        keys |= dict.fromkeys(names.split(), key)
    return keys


# Some functions write something for their caller on the host: a new handle, a size of scratch, or something else.
OUTPUTS = tomllib.loads((SOURCES / "outputs.toml").read_text(encoding="utf-8"))
CREATES = _by_name(OUTPUTS["creates"])
SIZES = _by_name(OUTPUTS["sizes"])
SIZE_TYPES = {"4": "int", "8": "size_t"}  # the C type of a size that has so many bytes
TITLES = {"cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cufft": "cuFFT", "curand": "cuRAND"}
WRITES = set(OUTPUTS["writes"]["names"].split())


@dataclass
class Library:
    """A library to build: its name, and the symbols that it must have, each with its version or an empty text."""

    name: str
    symbols: dict[str, str] = field(default_factory=dict)

    @property
    def stem(self) -> str:
        """The name without its ending, and without the hash that a wheel puts into the name of a library that it
        brings along."""
        return re.sub(r"-[0-9a-f]{8}$", "", self.name.partition(".so")[0])

    @property
    def sources(self) -> list[Path]:
        """The C files of the functions that are written by hand."""
        return [SOURCES / f"{name}.c" for name in LIBRARIES["by_hand"].get(self.stem, ())]


def build_stubs(files: Iterable[Path], cache: Path) -> Path:
    """Return the folder of stub libraries for these shared libraries, and build it if it is not in the cache.

    Raises:
        UnavailableError: there is no C compiler, or it fails; or the libraries want another CUDA than 12 or 13.
    """
    files = sorted(files)
    folder = cache / f"stubs-{_key(files)}"
    if (folder / OURS).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"), tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as aside:
        if not (folder / OURS).is_file():  # another process may have built the folder meanwhile
            new = Path(aside, "stubs")
            new.mkdir()
            _build(find_wanted_libraries(files), cuda_major(files), new)
            new.rename(folder)
    return folder


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_wanted_libraries(files: Sequence[Path]) -> list[Library]:
    """Return NVIDIA's libraries with the symbols that these files import from them."""
    libraries: dict[str, Library] = {}
    asker = _asker(files)
    for name, pattern in LIBRARIES["by_name"].items():
        texts = re.findall(pattern.encode(), asker)
        libraries[name] = Library(name, dict.fromkeys(map(bytes.decode, texts), ""))
    libraries["libcuda.so.1"].symbols |= dict.fromkeys(LIBRARIES["looked_for"], "")
    unversioned: set[str] = set()
    for path in files:
        imports = read_imports(path)
        for name in filter(NVIDIA.match, imports.libraries):
            libraries.setdefault(name, Library(name))
        for symbol, owner, version in imports.symbols:
            if NVIDIA.match(owner):
                libraries.setdefault(owner, Library(owner)).symbols[symbol] = version
            elif not owner:
                unversioned.add(symbol)
    for library in libraries.values():
        pattern = LIBRARIES["unversioned"].get(library.stem)
        if pattern:
            library.symbols |= dict.fromkeys(filter(re.compile(pattern).match, unversioned), "")
    return sorted(libraries.values(), key=lambda library: library.name)


def cuda_major(files: Iterable[Path]) -> int:
    """Return CUDA's major version, 12 or 13, as one of PyTorch's libraries names it. Raises UnavailableError for
    another one."""
    runtime = re.search(rb"libcudart\.so\.(\d+)", _asker(files))
    major = int(runtime[1]) if runtime else 0
    if major not in (12, 13):
        raise UnavailableError(
            f"emulator: this PyTorch wants {runtime[0].decode() if runtime else 'no CUDA runtime'}, "
            "and only CUDA 12 and 13 are emulated. Install a PyTorch that is built for one of them."
        )
    return major


def _asker(files: Iterable[Path]) -> bytes:
    """Return the content of ASKER, which contains the names that it asks for; empty if it is not among the files."""
    return b"".join(path.read_bytes() for path in files if path.name == ASKER)


# ---- compiling ----


def find_compiler() -> list[str]:
    """Return the command of a C compiler: `$CC`, the machine's, or that of the package ziglang. Raises UnavailableError
    if there is none."""
    if os.environ.get("CC"):
        return os.environ["CC"].split()
    for name in ("cc", "gcc", "clang"):
        command = shutil.which(name)
        if command:
            return [command]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise UnavailableError(
        "emulator: no C compiler (cc, gcc or clang) is on this machine. Install one, "
        "or one from the package index: pip install ziglang"
    )


def _build(libraries: list[Library], major: int, folder: Path) -> None:
    command = [*find_compiler(), "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-fno-builtin"]
    command += [f"-DCUDA_MAJOR={major}", f"-I{SOURCES}"]
    _compile([*command, str(SOURCES / "emulator.c"), f"-Wl,-soname,{OURS}", "-o", str(folder / OURS)])
    make = partial(_build_library, command, folder)
    others = []
    for library in libraries:
        if library.stem == RUNTIME:
            make(library)  # it comes first, since others are linked with it
        else:
            others.append(library)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(make, others))  # `list` waits for all, and raises the error of one that failed
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # older Triton links with that name


def _build_library(command: list[str], folder: Path, library: Library) -> None:
    generated = folder / f"{library.name}.c"
    generated.write_text(_write_functions(sorted(library.symbols)))
    script = folder / f"{library.name}.map"
    script.write_text(_write_versions(library.symbols))
    command = [*command, f"-Wl,-soname,{library.name}", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"]
    version = library.name.rpartition(".so.")[2]
    if version.isdecimal():
        command.append(f"-DLIBRARY_MAJOR={version}")
    if any(library.symbols.values()):
        command.append(f"-Wl,--version-script={script}")
    command += [*map(str, library.sources), str(generated), str(folder / OURS)]
    if library.stem in CALLS_RUNTIME:
        command += map(str, folder.glob(f"{RUNTIME}.so.*[0-9]"))
    _compile([*command, "-o", str(folder / library.name)])


def _write_functions(names: Iterable[str]) -> str:
    """Write the C file of an empty library: a macro of `stubs/stub.h` for each function. None of them says "success" to
    a caller who waits for an answer."""
    lines = ['#include "stub.h"']
    for name in names:
        if name in CREATES:
            lines.append(f"CREATES({name}, {CREATES[name]})")
        elif name in SIZES:
            lines.append(_write_size_function(name))
        elif name in WRITES or REFUSED.match(name):
            lines.append(f"REFUSED({name})")
        else:
            lines.append(f"STUB({name})")
    return "\n".join([*lines, ""])


def _write_size_function(name: str) -> str:
    """Write the macro of a function that is asked how many bytes of scratch another one wants, and answers: none."""
    answers = []
    for argument in SIZES[name].split():
        number, size = argument.split(":")
        answers.append(f"SIZE({SIZE_TYPES[size]}, {number})")
    prefix = re.match("cusolver|cusparse|cufft|curand", name)
    library = TITLES[prefix[0]] if prefix else "a library"
    return f'SIZES({name}, "scratch of {library}", {" ".join(answers)})'


def _write_versions(symbols: Mapping[str, str]) -> str:
    """Write a linker script: each version that a caller asks for, with its symbols."""
    by_version: dict[str, list[str]] = {}
    for symbol, version in symbols.items():
        if version:
            by_version.setdefault(version, []).append(f"{symbol};")
    return "".join(f"{version} {{ global: {' '.join(names)} }};\n" for version, names in sorted(by_version.items()))


def _compile(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise UnavailableError(
            f"emulator: {command[0]} could not build a stub library ({Path(command[-1]).name}): "
            f"{ended.stderr.strip()[-600:]} Try another compiler: pip install ziglang, "
            "then CC='python -m ziglang cc'."
        )
