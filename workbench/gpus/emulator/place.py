"""The place of PyTorch's CUDA build: with the program's Python, or in a folder of its own in the user's cache."""

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from workbench.base.errors import DISTRIBUTION, UnavailableError
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.emulator import build
from workbench.gpus.emulator.interpreter import Python, this_python

ARCHITECTURES = re.compile(rb"\0(sm_\d+(?: sm_\d+)+)[\0 ]")
CUDA_LIBRARY = Path("lib", "libtorch_cuda.so")
DOWNLOAD = "0.5 to 0.9 GB, about twice that unpacked"  # torch 2.13.0: 527 MB


def cache_folder() -> Path:
    """Return the user's folder for stubs, and for builds of PyTorch that are the emulator's alone."""
    return user_cache_path(DISTRIBUTION, appauthor=False) / "emulator"


@cache
def stub_folder(python: Python | None = None) -> Path:
    """Return the folder of stubs for the PyTorch that `torch_folder` finds, and build them if need be. Raises as
    `torch_folder` and `build_stubs` do."""
    python = python or this_python()
    return build.build_stubs(_libraries(torch_folder(python), python), cache_folder())


def torch_folder(python: Python | None = None) -> Path:
    """Return the folder `torch` of a CUDA build of the PyTorch that an interpreter has, by default this one.

    Raises:
        UnavailableError: there is no such folder yet, or it cannot be used on this machine.
    """
    refuse_other_machines()
    python = python or this_python()
    for folder in (Path(python.torch_folder), _own_place(python) / "torch"):
        if (folder / CUDA_LIBRARY).is_file():
            return folder
    if not python.torch_release:
        raise UnavailableError(
            f"emulator: {python.executable} has no PyTorch. Install it there, "
            "or name the Python that has the program's packages: "
            "emulate -- /its/venv/bin/python train.py"
        )
    raise UnavailableError(
        f"emulator: the PyTorch {python.torch_release} of {python.executable} has no CUDA inside, "
        f"and the emulated GPU runs PyTorch's CUDA build. Set it up once ({DOWNLOAD}; "
        f"it goes into {cache_folder()}): {_how_to(python)}"
    )


def _how_to(python: Python) -> str:
    if python.is_this_one:
        return "make emulator, or python -m workbench emulate --set-up"
    return f"emulate --set-up --python {python.executable}"


def python_path(python: Python | None = None) -> list[str]:
    """Return the folders that a child needs in front of its import path to get the CUDA build of this PyTorch."""
    python = python or this_python()
    folder = torch_folder(python)
    return [] if folder == Path(python.torch_folder) else [str(folder.parent)]


@cache
def architectures(torch: Path) -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities that a PyTorch has kernels for, as it says itself
    (`torch.cuda.get_arch_list()`); empty if it does not say.

    A kernel runs on the capability that it is for, and on later ones of the same major number.
    """
    library = torch / "lib" / "libtorch_python.so"
    content = library.read_bytes() if library.is_file() else b""
    flags = ARCHITECTURES.search(content)
    names = flags[1].decode().split() if flags else []
    return tuple((int(name[3:-1]), int(name[-1])) for name in names)


def without_kernels(python: Python) -> tuple[str, ...]:
    """Return the names of the cards that an interpreter's PyTorch has no kernels for."""
    capabilities = architectures(torch_folder(python))
    names = []
    for card in GPUS.values():
        major, minor = card.compute_capability
        if capabilities and not any(other[0] == major and other[1] <= minor for other in capabilities):
            names.append(card.name)
    return tuple(names)


def refuse_without_kernels(gpu: Gpu, python: Python) -> None:
    """Refuse a card for which the interpreter's PyTorch has no kernels: it could not run there.

    Raises:
        UnavailableError: there are none; the message says which build has them.
    """
    if gpu.name not in without_kernels(python):
        return
    capabilities = architectures(torch_folder(python))
    major, minor = gpu.compute_capability
    listed = ", ".join(f"{other[0]}.{other[1]}" for other in capabilities)
    raise UnavailableError(
        f"emulator: PyTorch {python.torch_release} has kernels for compute capabilities {listed}, "
        f"and the {gpu.title} has {major}.{minor}: a program that uses it fails there. "
        f"{_who_has_kernels(gpu.compute_capability)}"
    )


def _who_has_kernels(capability: tuple[int, int]) -> str:
    """Say which builds of PyTorch have kernels for a compute capability.

    The answer is from PyTorch's support matrix (https://github.com/pytorch/pytorch/blob/main/RELEASE.md, 2.9 to 2.14),
    and from what the builds of 2.3 and 2.6 say of themselves.
    """
    if capability < (7, 5):
        return (
            "Builds for CUDA 12.6 have them, up to PyTorch 2.14 (pip install torch --index-url "
            "https://download.pytorch.org/whl/cu126), and so has PyTorch 2.3 to 2.6 of pypi.org."
        )
    if capability >= (10, 0):
        return "Builds for CUDA 12.8 and newer have them, from PyTorch 2.7 on."
    return "Take another build of PyTorch."


def is_set_up() -> bool:
    """Whether the emulator can be used at once: PyTorch's CUDA build is installed, and the stubs can be built."""
    try:
        return bool(stub_folder())
    except UnavailableError:
        return False


def set_up(python: Python | None = None) -> Path:
    """Fetch PyTorch's CUDA build if it is missing, build the stubs, and return their folder.

    Raises:
        UnavailableError: pip cannot fetch it, or the stubs cannot be built.
    """
    refuse_other_machines()
    python = python or this_python()
    try:
        torch_folder(python)
    except UnavailableError:
        if not python.torch_release:
            raise
        _fetch(python)
    return stub_folder(python)


def refuse_other_machines() -> None:
    """Raise an UnavailableError on a machine that cannot load the stubs: they are for Linux on x86-64."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnavailableError(
            "emulator: the emulated GPU needs Linux on x86-64; this is "
            f"{platform.system()} on {platform.machine()}. "
            "`predict` works here without it (--engine shadow)."
        )


def _own_place(python: Python) -> Path:
    """Return the folder for a CUDA build of PyTorch that only the emulator uses."""
    return cache_folder() / f"torch-{python.torch_release}-python{python.version}"


def _libraries(torch: Path, python: Python) -> list[Path]:
    """Return every library that imports from NVIDIA's: PyTorch's own, and those of bitsandbytes."""
    libraries = [*torch.glob("lib/*.so"), *torch.glob("_C*.so")]
    major = build.cuda_major(libraries)
    if python.bitsandbytes_folder:
        libraries += Path(python.bitsandbytes_folder).glob(f"libbitsandbytes_cuda{major}*.so")
    return libraries


def _fetch(python: Python) -> None:
    release = python.torch_release
    place = _own_place(python)
    place.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching PyTorch {release} with CUDA ({DOWNLOAD}) into {place}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as folder:
        new = Path(folder, "new")
        command = [python.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # The sign === takes this name alone: == would also take a build called 2.13.0+cpu, if one is at hand.
        command += ["--target", str(new), f"torch==={release}"]
        pip = subprocess.run(command, check=False)
        if pip.returncode:
            raise UnavailableError(
                f"emulator: pip could not fetch torch {release} (exit code {pip.returncode}, "
                f"its words stand above). With another installer: put torch=={release}, "
                f"a CUDA build, without what it depends on, into {place}"
            )
        if not (new / "torch" / CUDA_LIBRARY).is_file():
            raise UnavailableError(
                f"emulator: the package index gave a torch {release} without CUDA. "
                "Point PIP_INDEX_URL at one that has it (pypi.org), "
                "or install a CUDA build of torch."
            )
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
