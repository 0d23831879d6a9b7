"""Where PyTorch's CUDA build is: the one that is installed, or one in a place of its own in the user's cache."""

import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from platformdirs import user_cache_path

from workbench.base.errors import DISTRIBUTION, UnavailableError
from workbench.gpus.emulator import build

CUDA_LIBRARY = Path("lib", "libtorch_cuda.so")
DOWNLOAD = "527 MB, 1.1 GB unpacked"  # torch 2.13.0
SET_UP = "make emulator, or python -m workbench emulate --set-up"


def cache_folder() -> Path:
    return user_cache_path(DISTRIBUTION, appauthor=False) / "emulator"


@cache
def stub_folder() -> Path:
    """The stubs for the PyTorch that `torch_folder` finds, built if they are not yet. Raises as it and `stubs` do."""
    return build.stubs(_libraries(torch_folder()), cache_folder())


def torch_folder() -> Path:
    """The folder `torch` of a CUDA build of the version that is installed.

    Raises:
        UnavailableError: there is none yet, or it cannot be used on this machine.
    """
    refuse_other_machines()
    for folder in (_installed(), _own_place() / "torch"):
        if (folder / CUDA_LIBRARY).is_file():
            return folder
    raise UnavailableError(
        f"emulator: the PyTorch that is installed ({version('torch')}) has no CUDA inside, and the emulated GPU runs "
        f"PyTorch's CUDA build. Set it up once ({DOWNLOAD}; it goes into {cache_folder()}): {SET_UP}"
    )


def python_path() -> list[str]:
    """What a child needs in front of its import path to get this PyTorch."""
    folder = torch_folder()
    return [] if folder == _installed() else [str(folder.parent)]


def is_set_up() -> bool:
    """Whether the emulator can be used at once: PyTorch's CUDA build is there, and the stubs can be built."""
    try:
        return bool(stub_folder())
    except UnavailableError:
        return False


def set_up() -> Path:
    """Fetch PyTorch's CUDA build if it is not there, build the stubs, and return their folder.

    Raises:
        UnavailableError: pip cannot fetch it, or the stubs cannot be built.
    """
    refuse_other_machines()
    try:
        torch_folder()
    except UnavailableError:
        _fetch(_own_place())
    return stub_folder()


def refuse_other_machines() -> None:
    """Raises UnavailableError where there is no such PyTorch: the stubs are for x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnavailableError(
            f"emulator: the emulated GPU needs Linux on x86-64; this is {platform.system()} on {platform.machine()}. "
            "`predict` works here without it (--engine shadow)."
        )


def _installed(package: str = "torch") -> Path:
    spec = find_spec(package)
    return Path(str(spec.origin)).parent if spec and spec.origin else Path("nowhere")


def _own_place() -> Path:
    """Where PyTorch's CUDA build goes that is only the emulator's."""
    return cache_folder() / f"torch-{_release()}-python{sys.version_info.major}.{sys.version_info.minor}"


def _release() -> str:
    return version("torch").partition("+")[0]


def _libraries(torch: Path) -> list[Path]:
    """Every library that asks NVIDIA's for something: PyTorch's own, and those of bitsandbytes."""
    libraries = [*torch.glob("lib/*.so"), *torch.glob("_C*.so")]
    major = build.cuda_major(libraries)
    return [*libraries, *_installed("bitsandbytes").glob(f"libbitsandbytes_cuda{major}*.so")]


def _fetch(place: Path) -> None:
    release = _release()
    place.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching PyTorch {release} with CUDA ({DOWNLOAD}) into {place}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as folder:
        new = Path(folder, "new")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        # three signs: == would also take a build that is called 2.13.0+cpu, where one is at hand
        command += ["--target", str(new), f"torch==={release}"]
        pip = subprocess.run(command, check=False)
        if pip.returncode:
            raise UnavailableError(
                f"emulator: pip could not fetch torch {release} (exit code {pip.returncode}, its words stand above). "
                f"With another installer: put torch=={release}, a CUDA build, without what it depends on, into {place}"
            )
        if not (new / "torch" / CUDA_LIBRARY).is_file():
            raise UnavailableError(
                f"emulator: the package index gave a torch {release} without CUDA. Point PIP_INDEX_URL at one that has "
                "it (pypi.org), or install a CUDA build of torch."
            )
        shutil.rmtree(place, ignore_errors=True)
        new.rename(place)
