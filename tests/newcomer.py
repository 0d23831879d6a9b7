"""Run a command as somebody has it who has just cloned the repository.

    python tests/newcomer.py python -m pytest

The command finds Python and its packages as they are here, but empty caches (the emulated GPU's and Hugging Face's
among them), empty folders of Jupyter's, and none of the programs in `HIDDEN`.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HIDDEN = re.compile(
    r"([\w-]+-)?(cc|c89|c99|gcc|g\+\+|c\+\+|clang|clang\+\+|nm)(-\d+)?"  # compilers, and what comes with them
    r"|chromium.*|google-chrome.*|nvidia-smi|nvcc"
)
FOLDERS = (
    "XDG_CACHE_HOME",
    "HF_HOME",
    "JUPYTER_CONFIG_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_RUNTIME_DIR",
    "IPYTHONDIR",
)
# Variables that begin with these are the developer's own.
SETTINGS = ("HF_", "HUGGING", "TRANSFORMERS_", "WORKBENCH_", "CC", "CXX", "CUDA_HOME")


def visible_programs(folder: Path, path: str) -> str:
    """Return a PATH without the hidden programs.

    A folder on the path that has one of them is replaced by links to all others in it.
    """
    parts = []
    for number, part in enumerate(path.split(os.pathsep)):
        try:
            names = os.listdir(part)
        except OSError:  # many a PATH names folders that do not exist
            continue
        if not any(HIDDEN.fullmatch(name) for name in names):
            parts.append(part)
            continue
        links = folder / f"programs-{number}"
        links.mkdir()
        for name in names:
            if not HIDDEN.fullmatch(name):
                (links / name).symlink_to(Path(part).absolute() / name)
        parts.append(str(links))
    return os.pathsep.join(parts)


def environment_in(folder: Path) -> dict[str, str]:
    """Return the environment of a newcomer, whose caches and settings are in a new folder."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(SETTINGS):
            environment[name] = value
    for name in FOLDERS:
        environment[name] = str(folder / name.lower())
    environment["PATH"] = visible_programs(folder, environment["PATH"])
    return environment


def main(command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        return subprocess.run(command, env=environment_in(Path(folder)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
