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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from lock import PINS, ROOT, canonical, content_lines, pins
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PLATFORMS = tuple(sorted(path.stem for path in (ROOT / "data" / "platforms").glob("*.txt")))
RECIPE = ("gpt2", "--gpu", "t4", "--batch-size", "4", "--sequence-length", "256")


class Trial(NamedTuple):
    """A command of the workbench, some words that its output should contain, and its exit code."""

    command: tuple[str, ...]
    expected_words: str
    exit_code: int = 0


TRIALS = [
    Trial(("predict", *RECIPE), "NVIDIA T4"),
    Trial(("predict", *RECIPE, "--technique", "lora"), "NVIDIA T4"),
    Trial(("run", "gpt2-tiny", "--steps", "2", "--device", "cpu"), "held out"),
    Trial(("plan", *RECIPE, "--budget", "3GiB"), "to spare"),
    Trial(("lessons", "out"), "notebooks copied to out"),
    Trial(("records",), "gpt2-tiny"),
    Trial(("compare",), "baseline"),
    Trial(("script", "gpt2-tiny"), "Trainer"),
    Trial(("--help",), "usage: workbench"),
]
INSTALL_EXTRA = 'pip install "gpt2-memory-workbench[lessons]"'
WITHOUT_EXTRA = [
    Trial(("notebooks", "memory_anatomy"), INSTALL_EXTRA, exit_code=3),
    Trial(("compare", "--save", "pictures"), INSTALL_EXTRA, exit_code=3),
]
WITH_EXTRA = [
    Trial(("compare", "--save", "pictures"), "memory.png"),
    Trial(("notebooks", "memory_anatomy"), "build/notebooks"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the wheel and use it in an empty environment.")
    parser.add_argument("--torch", default=pin_of("torch"))
    parser.add_argument("--transformers", default=pin_of("transformers"))
    parser.add_argument(
        "--libraries", choices=("pinned", "newest", "oldest"), default="pinned", help="oldest: all at the lower bounds"
    )
    parser.add_argument("--platform", choices=PLATFORMS, help="with the versions that it publishes; implies --lessons")
    parser.add_argument("--lessons", action="store_true", help="with the extra `lessons`; executes a notebook")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    args = parser.parse_args()
    args.lessons |= args.platform is not None
    with tempfile.TemporaryDirectory() as folder:
        return 0 if works(args, Path(folder)) else 1


def works(args: argparse.Namespace, folder: Path) -> bool:
    """Whether all commands end as they should, and write nothing into the installed package."""
    wheel = build_wheel(folder)
    versions = versions_for(args, wheel_requirements(wheel))
    shown_versions = f"{len(versions)} versions of {args.platform}" if args.platform else versions
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; {shown_versions}", flush=True)
    start = time.monotonic()
    programs = install(wheel, folder, args.python, versions, "[lessons]" if args.lessons else "")
    print(f"     {time.monotonic() - start:6.1f} s  pip install", flush=True)
    before = files_of_package(folder)
    fine = True
    for trial in TRIALS + (WITH_EXTRA if args.lessons else WITHOUT_EXTRA):
        fine &= try_command(programs, folder, trial)
    written = files_of_package(folder) - before
    if written:
        print(f"FAIL written into the installed package: {sorted(map(str, written))}")
    return fine and not written


# ---- which versions ----


def versions_for(args: argparse.Namespace, requirements: list[Requirement]) -> dict[str, str]:
    """Return the version of each library that shall not come in its newest one."""
    if args.platform:
        return versions_on(args.platform, requirements)
    if args.libraries == "oldest":
        return lower_bounds(requirements, "lessons" if args.lessons else "")
    if args.libraries == "newest":
        return {}
    return {"torch": args.torch, "transformers": args.transformers}


def pin_of(name: str) -> str:
    versions = dict(pin.split("==") for pin in pins(PINS.read_text(encoding="utf-8")))
    return versions[name]


def requirements_with(requirements: list[Requirement], extra: str) -> list[Requirement]:
    """Return what the wheel requires by itself and with that extra."""
    chosen = []
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            chosen.append(requirement)
    return chosen


def lower_bounds(requirements: list[Requirement], extra: str) -> dict[str, str]:
    """Map the name to the version of each `name>=version` that is required."""
    versions = {}
    for requirement in requirements_with(requirements, extra):
        for bound in requirement.specifier:
            if bound.operator == ">=":
                versions[requirement.name] = bound.version
    return versions


def versions_on(platform: str, requirements: list[Requirement]) -> dict[str, str]:
    """Return the versions that the platform has and the wheel allows."""
    all_requirements = requirements_with(requirements, "lessons")
    ranges = {canonical(requirement.name): requirement.specifier for requirement in all_requirements}
    versions = {}
    for name, version in read_platform(platform).items():
        if version in ranges.get(name, SpecifierSet()):
            versions[name] = version.public
    return versions


def read_platform(platform: str) -> dict[str, Version]:
    """Read which versions Colab or Kaggle has of the libraries that concern us, by canonical name."""
    text = (ROOT / "data" / "platforms" / f"{platform}.txt").read_text(encoding="utf-8")
    versions = {}
    for line in content_lines(text):
        name, version = line.split("==")
        versions[canonical(name)] = Version(version)
    return versions


# ---- the wheel ----


def build_wheel(folder: Path) -> Path:
    """Build the wheel without the network: the build backend is one of the pins."""
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def wheel_requirements(wheel: Path) -> list[Requirement]:
    """Read `Requires-Dist` in the wheel's metadata, which has the requirements of all extras too."""
    name, version, *_ = wheel.name.split("-")
    with ZipFile(wheel) as archive:
        text = archive.read(f"{name}-{version}.dist-info/METADATA")
    return Metadata.from_email(text, validate=False).requires_dist or []


def install(wheel: Path, folder: Path, python: str, versions: dict[str, str], extra: str) -> Path:
    """Install the wheel and what it requires, nothing else, into a new environment, and return its `bin` folder."""
    environment = folder / "environment"
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    constraints = folder / "constraints.txt"
    lines = [f"{name}=={version}\n" for name, version in versions.items()]
    constraints.write_text("".join(lines), encoding="utf-8")
    pip = [str(programs / "python"), "-m", "pip", "install", "-qq", "-c", str(constraints)]
    subprocess.run([*pip, f"gpt2-memory-workbench{extra} @ {wheel.as_uri()}"], check=True)
    return programs


def files_of_package(folder: Path) -> set[Path]:
    (package,) = folder.rglob("site-packages/workbench")
    return {path for path in package.rglob("*") if "__pycache__" not in path.parts}


# ---- its commands ----


def try_command(programs: Path, folder: Path, trial: Trial) -> bool:
    """Run a trial in the folder `empty`, with a home of its own and nothing of this checkout in the environment."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    start = time.monotonic()
    done = subprocess.run(
        [str(programs / "workbench"), *trial.command],
        cwd=empty,
        env=environment_of_somebody_else(folder / "home"),
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    fine = done.returncode == trial.exit_code and trial.expected_words in output and "Traceback" not in done.stderr
    verdict = "ok  " if fine else "FAIL"
    print(f"{verdict} {time.monotonic() - start:6.1f} s  workbench {' '.join(trial.command)}", flush=True)
    if not fine:
        print(f"exit code {done.returncode}, expected {trial.exit_code} and {trial.expected_words!r}\n{output}")
    return fine


def environment_of_somebody_else(home: Path) -> dict[str, str]:
    ours = ("PYTHON", "WORKBENCH")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return variables | {"HOME": str(home), "XDG_DATA_HOME": str(home / "data")}


if __name__ == "__main__":
    sys.exit(main())
