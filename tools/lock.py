"""Write requirements.lock and requirements-cuda.lock: the pins of requirements.txt with the hashes of their wheels.

    pip install uv==0.13.9 && python tools/lock.py

Run it after a change of requirements.txt, which stays the only place of the versions; `make lint` compares. The
hashes are those of every file of a version on the package index, so one lock serves all platforms and Pythons.

    pip install --require-hashes --no-deps -r requirements.lock                             # CPU, macOS, Windows
    pip install --require-hashes --no-deps -r requirements.lock -r requirements-cuda.lock   # Linux with CUDA
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements.txt"
HASH = "--hash=sha256:"
QUIET = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-config", "--quiet")
# Builds of a pin that are not on the package index. PyTorch's CPU index; computed from the file itself.
OTHER_BUILDS = {
    "torch==2.13.0": {  # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    },
}


def main() -> None:
    locked = compile_lock("--no-deps")
    for pin, hashes in OTHER_BUILDS.items():
        locked[pin] |= hashes
    write(ROOT / "requirements.lock", locked, "The pins of requirements.txt with the hashes of all their files.")
    with_cuda = compile_lock("--python-platform", "x86_64-unknown-linux-gnu")
    for pin in locked:
        with_cuda.pop(pin, None)
    write(ROOT / "requirements-cuda.lock", with_cuda, "What PyTorch's CUDA build needs besides, on Linux.")


# ---- reading ----


def content_lines(text: str) -> Iterator[str]:
    """Yield the lines that are neither comments nor empty."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def pins(text: str) -> dict[str, str]:
    """Map each `name==version` to the platforms that it is for, as in PEP 508; empty where it is for all."""
    platforms_by_pin = {}
    for line in content_lines(text):
        pin, _, platforms = line.partition(";")
        name, version = pin.strip().split("==")
        platforms_by_pin[f"{canonical(name)}=={version}"] = platforms.strip()
    return platforms_by_pin


def entries(lock: str) -> dict[str, set[str]]:
    """Map each `name==version` to its hashes, which a lock has on lines of their own: a backslash joins them."""
    hashes_by_pin = {}
    for line in content_lines(lock.replace("\\\n", " ")):
        pin, *parts = line.split()
        hashes_by_pin[pin] = {part.removeprefix(HASH) for part in parts if part.startswith(HASH)}
    return hashes_by_pin


# ---- writing ----


def compile_lock(*options: str) -> dict[str, set[str]]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--generate-hashes", *QUIET, *options, str(PINS)]
    return entries(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write(path: Path, locked: dict[str, set[str]], title: str) -> None:
    platforms = pins(PINS.read_text(encoding="utf-8"))
    text = f"# {title} Written by tools/lock.py.\n"
    for pin, hashes in sorted(locked.items()):
        text += pin
        if platforms.get(pin):
            text += f" ; {platforms[pin]}"
        for digest in sorted(hashes):
            text += f" \\\n    {HASH}{digest}"
        text += "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
