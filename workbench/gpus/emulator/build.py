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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock

from workbench.base.errors import UnavailableError
from workbench.gpus.emulator.elf import imports

SOURCES = Path(__file__).with_name("stubs")
OURS = "libemulator.so"
NVIDIA = re.compile(r"lib(cu|nccl|nvrtc|nvshmem|nvJitLink|nvToolsExt|nvidia-ml)")
LIBRARIES = tomllib.loads((SOURCES / "libraries.toml").read_text(encoding="utf-8"))
ASKER = "libc10_cuda.so"
RUNTIME = "libcudart"
CALLS_RUNTIME = ("libcuda", "libnvidia-ml", "libnccl")  # these are written on top of it
REFUSED = re.compile("|".join(LIBRARIES["refused"]))


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """The key of each of the names that a table lists under it."""
    keys: dict[str, str] = {}
    for key, names in table.items():
        keys |= dict.fromkeys(names.split(), key)
    return keys


# What functions write for their caller on the host: a new handle, a size of scratch, or something else.
OUTPUTS = tomllib.loads((SOURCES / "outputs.toml").read_text(encoding="utf-8"))
CREATES = _by_name(OUTPUTS["creates"])
SIZES = _by_name(OUTPUTS["sizes"])
SIZE_TYPES = {"4": "int", "8": "size_t"}  # by its bytes
TITLES = {"cusolver": "cuSOLVER", "cusparse": "cuSPARSE", "cufft": "cuFFT", "curand": "cuRAND"}
WRITES = set(OUTPUTS["writes"]["names"].split())


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
    if (folder / OURS).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock"), tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as aside:
        if not (folder / OURS).is_file():  # which another process may have built meanwhile
            new = Path(aside, "stubs")
            new.mkdir()
            _build(wanted(files), cuda_major(files), new)
            new.rename(folder)
    return folder


def _key(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    for path in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def wanted(files: Sequence[Path]) -> list[Library]:
    """NVIDIA's libraries, as these files import from them."""
    libraries: dict[str, Library] = {}
    asker = _asker(files)
    for name, pattern in LIBRARIES["by_name"].items():
        texts = re.findall(pattern.encode(), asker)
        libraries[name] = Library(name, dict.fromkeys(map(bytes.decode, texts), ""))
    libraries["libcuda.so.1"].symbols |= dict.fromkeys(LIBRARIES["looked_for"], "")
    unversioned: set[str] = set()
    for path in files:
        imported = imports(path)
        for name in filter(NVIDIA.match, imported.needed):
            libraries.setdefault(name, Library(name))
        for symbol, owner, version in imported.symbols:
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
    """12 or 13, as one of PyTorch's libraries says. Raises UnavailableError for another CUDA."""
    runtime = re.search(rb"libcudart\.so\.(\d+)", _asker(files))
    major = int(runtime[1]) if runtime else 0
    if major not in (12, 13):
        raise UnavailableError(
            f"emulator: this PyTorch wants {runtime[0].decode() if runtime else 'no CUDA runtime'}, "
            "and only CUDA 12 and 13 are emulated. Install a PyTorch that is built for one of them."
        )
    return major


def _asker(files: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in files if path.name == ASKER)


# ---- compiling ----


def compiler() -> list[str]:
    """The command of a C compiler: `$CC`, what the machine has, or the ziglang package. Raises UnavailableError."""
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
    command = [*compiler(), "-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-fno-builtin"]
    command += [f"-DCUDA_MAJOR={major}", f"-I{SOURCES}"]
    _compile([*command, str(SOURCES / "emulator.c"), f"-Wl,-soname,{OURS}", "-o", str(folder / OURS)])
    make = partial(_make, command, folder)
    others = []
    for library in libraries:
        if library.stem == RUNTIME:
            make(library)  # the others are linked with it
        else:
            others.append(library)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(make, others))  # `list` waits, and raises what a compiler said
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # older Triton links with that name


def _make(command: list[str], folder: Path, library: Library) -> None:
    generated = folder / f"{library.name}.c"
    generated.write_text(_functions(sorted(library.symbols)))
    script = folder / f"{library.name}.map"
    script.write_text(_versions(library.symbols))
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


def _functions(names: Iterable[str]) -> str:
    """A macro of `stubs/stub.h` for each. None says "success" to a caller who waits for an answer."""
    lines = ['#include "stub.h"']
    for name in names:
        if name in CREATES:
            lines.append(f"CREATES({name}, {CREATES[name]})")
        elif name in SIZES:
            lines.append(_says_no_scratch(name))
        elif name in WRITES or REFUSED.match(name):
            lines.append(f"REFUSED({name})")
        else:
            lines.append(f"STUB({name})")
    return "\n".join([*lines, ""])


def _says_no_scratch(name: str) -> str:
    """A macro for a function that is asked how many bytes of scratch another one wants."""
    answers = []
    for argument in SIZES[name].split():
        number, size = argument.split(":")
        answers.append(f"SIZE({SIZE_TYPES[size]}, {number})")
    prefix = re.match("cusolver|cusparse|cufft|curand", name)
    library = TITLES[prefix[0]] if prefix else "a library"
    return f'SIZES({name}, "scratch of {library}", {" ".join(answers)})'


def _versions(symbols: Mapping[str, str]) -> str:
    """A linker script: each version that a caller asks for, with its symbols."""
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
