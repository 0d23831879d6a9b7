"""Write requirements.lock and requirements-cuda.lock: the pins of requirements.txt with the hashes of their wheels.

    pip install uv==0.13.9 && python tools/lock.py

Run it after a change of requirements.txt, which stays the only place of the versions; `make lint` compares. The
hashes are those of every file of a version on the package index, so one lock serves all platforms and Pythons.

    pip install --require-hashes --no-deps -r requirements.lock                             # CPU, macOS, Windows
    pip install --require-hashes --no-deps -r requirements.lock -r requirements-cuda.lock   # Linux with CUDA
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements.txt"
QUIET = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-config", "--quiet")
# Builds of a pin that are not on the package index. PyTorch's CPU index; computed from the file itself.
OTHER_BUILDS = {
    "torch==2.13.0": {  # torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    },
}


def entries(lock: str) -> dict[str, set[str]]:
    """`name==version` to its hashes. Continuation lines carry one hash each."""
    joined = lock.replace("\\\n", " ")
    lines = (line.split() for line in joined.splitlines() if line.strip() and not line.startswith("#"))
    hashes = "--hash=sha256:"
    return {words[0]: {word.removeprefix(hashes) for word in words if word.startswith(hashes)} for words in lines}


def pins(text: str) -> dict[str, str]:
    """`name==version` to the platforms that it is for, as in PEP 508; empty where it is for all."""
    found = (line.partition(";") for line in text.splitlines() if line.strip() and not line.startswith("#"))
    parts = ((*pin.strip().split("=="), platforms.strip()) for pin, _, platforms in found)
    return {f"{canonical(name)}=={version}": platforms for name, version, platforms in parts}


def canonical(name: str) -> str:
    """As in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def compile_lock(*options: str) -> dict[str, set[str]]:
    command = [sys.executable, "-m", "uv", "pip", "compile", "--generate-hashes", *QUIET, *options, str(PINS)]
    return entries(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write(path: Path, locked: dict[str, set[str]], title: str) -> None:
    platforms = pins(PINS.read_text(encoding="utf-8"))
    blocks = [
        " \\\n".join(
            [
                f"{pin} ; {platforms[pin]}" if platforms.get(pin) else pin,
                *(f"    --hash=sha256:{digest}" for digest in sorted(digests)),
            ]
        )
        for pin, digests in sorted(locked.items())
    ]
    path.write_text("\n".join([f"# {title} Written by tools/lock.py.", *blocks]) + "\n", encoding="utf-8")


def main() -> None:
    every = compile_lock("--no-deps")
    for pin, digests in OTHER_BUILDS.items():
        every[pin] |= digests
    write(ROOT / "requirements.lock", every, "The pins of requirements.txt with the hashes of all their files.")
    with_cuda = compile_lock("--python-platform", "x86_64-unknown-linux-gnu")
    more = {pin: digests for pin, digests in with_cuda.items() if pin not in every}
    write(ROOT / "requirements-cuda.lock", more, "What PyTorch's CUDA build needs besides, on Linux.")


if __name__ == "__main__":
    main()
