"""The Python that a program runs in, which may be another than this one: the card is made for the PyTorch there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workbench.base.errors import ConfigurationError
from workbench.gpus.emulator.inside import _emulated_python

MEANT = ("python", "python3")  # without a path: see `python_meant`
PYTHON = re.compile(r"python[\d.]*")
# `#!/venv/bin/python`, `#!/usr/bin/env python`; pip writes a long path into a second line, which a shell executes
SHEBANG = re.compile(r"#!\s*(?:/\S*/env\s+(?:-S\s+)?)?(\S*python[\d.]*)|#!/bin/sh\s+'''exec' \"?([^\"\n]*python[\d.]*)")
SECONDS_TO_ANSWER = 60.0


@dataclass(frozen=True)
class Python:
    """An interpreter, and its PyTorch: `torch_release` as 2.6.0 and its folder, both empty where there is none."""

    executable: str
    version: str
    prefix: str
    torch_release: str
    torch_folder: str
    bitsandbytes_folder: str

    @property
    def is_this_one(self) -> bool:
        return self.prefix == sys.prefix


@cache
def this_python() -> Python:
    """The one that runs this."""
    return Python(sys.executable, **_emulated_python.describe_python())


@cache
def ask_python(executable: str) -> Python:
    """What the interpreter of this path says of itself. Raises ConfigurationError: there is none, or it fails."""
    if executable == sys.executable:
        return this_python()
    command = [executable, str(_emulated_python.__file__)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=True)
        return Python(executable, **json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"emulate: {executable} does not answer as a Python of 3.9 or newer ({error}). "
            "Name the Python that has the program's PyTorch with --python."
        ) from None


def python_meant(environment: Mapping[str, str] = os.environ) -> Python:
    """What `python` means: that of the environment that is activated, this one, or the first of PATH; of these the
    first with a PyTorch, and this one if none has it."""
    candidates = []
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = environment.get(name) or sys.prefix
        if folder != sys.prefix:
            candidates.append(str(Path(folder, "bin", "python")))
    candidates += [sys.executable, *filter(None, map(shutil.which, MEANT))]
    for executable in candidates:
        if os.access(executable, os.X_OK):
            python = ask_python(executable)
            if python.torch_release:
                return python
    return this_python()


def python_of(command: Sequence[str]) -> Python:
    """The interpreter of a command: a Python that is named, or that of a script's first line (torchrun, accelerate,
    papermill); where there is none, or it has no PyTorch, what `python` means."""
    path = shutil.which(command[0])
    if path is None:
        return python_meant()
    if PYTHON.fullmatch(Path(path).name):
        return ask_python(os.path.abspath(path))
    with open(path, "rb") as file:
        beginning = file.read(1000).decode("utf-8", "replace")
    shebang = SHEBANG.match(beginning)
    executable = shutil.which(shebang[1] or shebang[2]) if shebang else None
    if executable is not None:
        python = ask_python(executable)
        if python.torch_release:
            return python
    return python_meant()
