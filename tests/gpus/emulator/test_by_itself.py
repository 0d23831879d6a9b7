"""The emulator as a distribution of its own: its files, and nothing but what it says that it needs."""

import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from workbench.gpus.emulator import place

FOLDER = Path(place.__file__).parent
IMPORTED_AS = {"pyelftools": "elftools"}
ALONE = """
import sys
sys.path[:0] = sys.argv[1:3]
from workbench.gpus.emulator.command import emulate_by_itself
sys.exit(emulate_by_itself(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs it with arguments where there is nothing but its wheel and the packages that this names."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=FOLDER, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "its own")
    packages = folder / "packages"
    packages.mkdir()
    for line in tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]:
        distribution = line.partition(">")[0]
        name = IMPORTED_AS.get(distribution, distribution)
        (packages / name).symlink_to(Path(find_spec(name).origin).parent)

    def run(*arguments):
        command = [sys.executable, "-I", "-S", "-c", ALONE, str(folder / "its own"), str(packages), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_it_needs_neither_pytorch_nor_transformers_where_it_is_installed(alone):
    version = alone("--version")
    assert (version.returncode, version.stderr) == (0, "")
    refused = alone("--gpu", "t5", "--", "python", "train.py")
    assert refused.returncode == 2
    assert "error: gpu: there is no 't5'. Known: t4, " in refused.stderr


@pytest.mark.usefixtures("emulator")
def test_it_runs_a_program_on_the_pytorch_of_the_python_that_is_named(alone):
    program = "import os; print(os.environ['EMULATED_CARD'])"
    name = "python3" if Path(sys.executable).name == "python" else "python"
    python = Path(sys.executable).with_name(name)  # the same one, which the emulator does not know
    ended = alone("--json", "--gpu", "t4", "--", str(python), "-c", program)
    assert ended.returncode == 0, ended.stderr
    assert '"gpu": "t4"' in ended.stdout
    assert "\nt4\n" in ended.stderr
