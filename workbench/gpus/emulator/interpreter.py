"""The Python interpreter of a program, which may be another than this one: the stubs are built for its PyTorch."""

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

BARE_NAMES = ("python", "python3")  # names without a path, for which `find_default_python` finds the interpreter
PYTHON = re.compile(r"python[\d.]*")
# A script begins with `#!/venv/bin/python` or `#!/usr/bin/env python`; pip writes a long path into a second line, which
# a shell executes.
SHEBANG = re.compile(r"#!\s*(?:/\S*/env\s+(?:-S\s+)?)?(\S*python[\d.]*)|#!/bin/sh\s+'''exec' \"?([^\"\n]*python[\d.]*)")
SECONDS_TO_ANSWER = 60.0


@dataclass(frozen=True)
class Python:
    """An interpreter and its PyTorch: `torch_release` is as 2.6.0; it and `torch_folder` are empty if there is none."""

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
    """Return the interpreter that runs this."""
    return Python(sys.executable, **_emulated_python.describe_python())


@cache
def ask_python(executable: str) -> Python:
    """Ask the interpreter of a path about itself. Raises ConfigurationError if there is none, or if it fails."""
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


def find_default_python(environment: Mapping[str, str] = os.environ) -> Python:
    """Find the interpreter that `python` means: of the activated environment's, this one and the first of PATH, the
    first that has a PyTorch; this one if none has."""
    candidates = []
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = environment.get(name) or sys.prefix
        if folder != sys.prefix:
            candidates.append(str(Path(folder, "bin", "python")))
    candidates += [sys.executable, *filter(None, map(shutil.which, BARE_NAMES))]
    for executable in candidates:
        if os.access(executable, os.X_OK):
            python = ask_python(executable)
            if python.torch_release:
                return python
    return this_python()


def find_python_of(command: Sequence[str]) -> Python:
    """Find the interpreter of a command: the Python that it names, or that of a script's first line (torchrun,
    accelerate, papermill); if there is none, or it has no PyTorch, the interpreter that `python` means."""
    path = shutil.which(command[0])
    if path is None:
        return find_default_python()
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
    return find_default_python()
