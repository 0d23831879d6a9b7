"""The facts that the emulator must know of a program's Python. That Python executes this file, or ours calls it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from typing import Any


def describe_python() -> dict[str, Any]:
    """Return the version of this Python, its prefix, PyTorch's release, and the folders of PyTorch and bitsandbytes;
    texts are empty for packages that are not installed."""
    try:
        release = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        release = ""
    return {
        "version": f"{sys.version_info[0]}.{sys.version_info[1]}",
        "prefix": sys.prefix,
        "torch_release": release,
        "torch_folder": _folder("torch"),
        "bitsandbytes_folder": _folder("bitsandbytes"),
    }


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


if __name__ == "__main__":
    print(json.dumps(describe_python()))
