"""Build the wheel, install it into an empty environment, and use it in an empty folder, as somebody else would.

    python tools/try_wheel.py                                            # PyTorch and Transformers as pinned here
    python tools/try_wheel.py --platform colab --python python3.13       # with what Colab has, by data/platforms
    python tools/try_wheel.py --libraries oldest                         # every lower bound of pyproject.toml
    python tools/try_wheel.py --libraries newest                         # whatever the package index has
    python tools/try_wheel.py --lessons                                  # with the extra, and a notebook executed

What is not named comes in the newest version that the package index has, PyTorch on Linux with its CUDA libraries
(several GB) unless PIP_EXTRA_INDEX_URL names PyTorch's index of CPU builds. A platform's list says which Python it has.
Prints each command with its time; ends with 1 if one of them does not end as it should, or if anything was written into
the installed package.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from lock import PINS, ROOT, canonical
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PLATFORMS = tuple(sorted(path.stem for path in (ROOT / "data" / "platforms").glob("*.txt")))
RECIPE = ("gpt2", "--gpu", "t4", "--batch-size", "4", "--sequence-length", "256")
# each with the exit code that it should have and words that its output should contain
COMMANDS = [
    (("predict", *RECIPE), 0, "NVIDIA T4"),
    (("predict", *RECIPE, "--technique", "lora"), 0, "NVIDIA T4"),
    (("run", "gpt2-tiny", "--steps", "2", "--device", "cpu"), 0, "held out"),
    (("plan", *RECIPE, "--budget", "3GiB"), 0, "to spare"),
    (("lessons", "out"), 0, "notebooks copied to out"),
    (("records",), 0, "gpt2-tiny"),
    (("compare",), 0, "baseline"),
    (("script", "gpt2-tiny"), 0, "Trainer"),
    (("--help",), 0, "usage: workbench"),
]
WITHOUT_EXTRA = [
    (("notebooks", "memory_anatomy"), 3, 'pip install "gpt2-memory-workbench[lessons]"'),
    (("compare", "--save", "pictures"), 3, 'pip install "gpt2-memory-workbench[lessons]"'),
]
WITH_EXTRA = [
    (("compare", "--save", "pictures"), 0, "memory.png"),
    (("notebooks", "memory_anatomy"), 0, "build/notebooks"),
]


def build_wheel(folder: Path) -> Path:
    """Without the network: the build backend is one of the pins."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """`Requires-Dist` of its metadata, of all its extras too."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1)
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines]


def wanted(requirements: list[Requirement], extra: str) -> list[Requirement]:
    """What the wheel brings by itself and with that extra."""
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]


def lower_bounds(requirements: list[Requirement], extra: str) -> dict[str, str]:
    """Name and version of each `name>=version` that is wanted."""
    ranges = wanted(requirements, extra)
    return {r.name: bound.version for r in ranges for bound in r.specifier if bound.operator == ">="}


def kept(platform: str, requirements: list[Requirement]) -> dict[str, str]:
    """What the platform has, without what lies outside of the wheel's ranges."""
    ranges = {canonical(r.name): r.specifier for r in wanted(requirements, "lessons")}
    there = published(platform).items()
    return {name: version.public for name, version in there if version in ranges.get(name, SpecifierSet())}


def published(platform: str) -> dict[str, Version]:
    """What Colab or Kaggle has of what concerns us, by canonical name."""
    lines = (ROOT / "data" / "platforms" / f"{platform}.txt").read_text(encoding="utf-8").splitlines()
    found = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): Version(version) for name, version in found}


def pinned(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)$", PINS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert found, f"{PINS} does not pin {name}"
    return found[1]


def install(wheel: Path, folder: Path, python: str, versions: dict[str, str], extra: str) -> Path:
    """The `bin` folder of a new environment with nothing in it but the wheel and what that requires."""
    subprocess.run([python, "-m", "venv", str(folder / "environment")], check=True)
    programs = folder / "environment" / ("Scripts" if os.name == "nt" else "bin")
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()), encoding="utf-8")
    wanted = f"gpt2-memory-workbench{extra} @ {wheel.as_uri()}"
    subprocess.run(
        [str(programs / "python"), "-m", "pip", "install", "-qq", "-c", str(constraints), wanted], check=True
    )
    return programs


def installed_files(folder: Path) -> set[Path]:
    (package,) = folder.rglob("site-packages/workbench")
    return {path for path in package.rglob("*") if "__pycache__" not in path.parts}


def try_command(programs: Path, folder: Path, command: tuple[str, ...], exit_code: int, words: str) -> bool:
    """Run in the folder `empty`, with a home of its own and nothing of this checkout in the environment."""
    folder.joinpath("empty").mkdir(exist_ok=True)
    start = time.monotonic()
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "WORKBENCH"))}
    environment |= {"HOME": str(folder / "home"), "XDG_DATA_HOME": str(folder / "home" / "data")}
    done = subprocess.run(
        [str(programs / "workbench"), *command], cwd=folder / "empty", env=environment, capture_output=True, text=True
    )
    fine = done.returncode == exit_code and words in done.stdout + done.stderr and "Traceback" not in done.stderr
    print(f"{'ok  ' if fine else 'FAIL'} {time.monotonic() - start:6.1f} s  workbench {' '.join(command)}", flush=True)
    if not fine:
        print(f"exit code {done.returncode}, expected {exit_code} and {words!r}\n{done.stdout}{done.stderr}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and use it in an empty environment.")
    parser.add_argument("--torch", default=pinned("torch"))
    parser.add_argument("--transformers", default=pinned("transformers"))
    parser.add_argument(
        "--libraries", choices=("pinned", "newest", "oldest"), default="pinned", help="oldest: all at the lower bounds"
    )
    parser.add_argument("--platform", choices=PLATFORMS, help="with the versions that it publishes; implies --lessons")
    parser.add_argument("--lessons", action="store_true", help="with the extra `lessons`; executes a notebook")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    args = parser.parse_args()
    args.lessons |= args.platform is not None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder)
        pins = {"torch": args.torch, "transformers": args.transformers}
        versions = pins if args.libraries == "pinned" else {}
        if args.libraries == "oldest":
            versions = lower_bounds(wheel_requirements(wheel), "lessons" if args.lessons else "")
        if args.platform:
            versions = kept(args.platform, wheel_requirements(wheel))
        told = f"{len(versions)} versions of {args.platform}" if args.platform else versions
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; {told}", flush=True)
        start = time.monotonic()
        programs = install(wheel, folder, args.python, versions, "[lessons]" if args.lessons else "")
        print(f"     {time.monotonic() - start:6.1f} s  pip install", flush=True)
        before = installed_files(folder)
        commands = [*COMMANDS, *(WITH_EXTRA if args.lessons else WITHOUT_EXTRA)]
        fine = [try_command(programs, folder, *command) for command in commands]
        if written := installed_files(folder) - before:
            print(f"FAIL written into the installed package: {sorted(map(str, written))}")
        return int(not all(fine) or bool(written))


if __name__ == "__main__":
    sys.exit(main())
