"""The wheel: what it requires, what lies in it, and that it works where there is no checkout.

That its ranges hold the pins, and name all that is imported, is `tests/lint.py`'s.
"""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from lock import canonical
from try_wheel import build_wheel, lower_bounds, wheel_requirements

from workbench.__main__ import main
from workbench.base.errors import missing_extra_error
from workbench.base.paths import NOTEBOOKS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def requirements(wheel):
    """Of what the wheel brings alone (under ""), and of each extra: canonical names with their ranges."""
    found = {}
    for requirement in wheel_requirements(wheel):
        extra = str(requirement.marker or "").partition('extra == "')[2].rstrip('"')
        found.setdefault(extra, {})[canonical(requirement.name)] = requirement.specifier
    return found


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    """As pip lays it out, inside of somebody's git repository."""
    folder = tmp_path_factory.mktemp("project")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "site-packages")
    return folder / "site-packages"


def from_wheel(unpacked, *arguments):
    """Python in the parent of the unpacked wheel, with its `workbench` before that of the checkout."""
    environment = {name: text for name, text in os.environ.items() if name != "WORKBENCH_RUNS"}
    environment |= {"PYTHONPATH": str(unpacked), "XDG_DATA_HOME": str(unpacked.parent / "data-of-user")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=unpacked.parent, env=environment, capture_output=True, text=True, check=True)


def test_the_wheel_brings_ranges_and_no_checks(requirements):
    runtime = requirements[""]
    assert {"torch", "transformers", "datasets", "peft", "pandas"} <= runtime.keys()
    assert not runtime.keys() & requirements["dev"].keys()
    assert not runtime.keys() & requirements["lessons"].keys()
    for name, specifier in runtime.items():
        assert [part.operator for part in specifier] == [">="], name
    assert str(runtime["torch"]) == ">=2.10"
    assert str(runtime["transformers"]) == ">=5.15"


def test_every_range_has_a_lower_bound_that_can_be_tried(wheel, requirements):
    for extra in ("", "lessons"):
        tried = {canonical(name) for name in lower_bounds(wheel_requirements(wheel), extra)}
        assert tried == requirements[""].keys() | requirements[extra].keys()


def test_models_texts_tables_and_notebooks_are_in_the_wheel(wheel):
    names = set(ZipFile(wheel).namelist())
    assert {f"workbench/_data/notebooks/{path.name}" for path in NOTEBOOKS.glob("*.ipynb")} <= names
    for file in (
        "models/gpt2-tiny/model.safetensors",
        "models/gpt2/merges.txt",
        "corpora/shakespeare/train.txt",
        "reference/grid.json",
    ):
        assert f"workbench/_data/{file}" in names
    inside = "workbench/gpus/emulator/inside/_emulated_history.py"
    assert {"workbench/py.typed", "workbench/__init__.pyi", "workbench/lessons/timeline.html", inside} <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"workbench"}
    assert {name.split("/")[2] for name in names if "/_data/" in name} == {
        "models",
        "corpora",
        "predictions",
        "reference",
        "notebooks",
    }
    assert wheel.stat().st_size < 10_000_000


def test_an_installed_package_finds_its_data_and_writes_elsewhere(unpacked):
    program = (
        "from workbench.base import paths; from workbench.base.paths import git_commit; from workbench.models import "
        "source; print(paths.PACKAGE, paths.runs_folder(), paths.BUILD, repr(git_commit()), sep='\\n'); "
        "print(paths.DATA.is_dir(), source.locate('gpt2-tiny').location)"
    )
    package, runs, build, commit, data = from_wheel(unpacked, "-c", program).stdout.splitlines()
    assert Path(package) == unpacked / "workbench"
    if sys.platform == "linux":
        assert Path(runs) == unpacked.parent / "data-of-user" / "gpt2-memory-workbench" / "runs"
    assert unpacked not in Path(runs).parents
    assert Path(build) == unpacked.parent / "build"
    assert commit == "''"
    assert data == f"True {unpacked / 'workbench' / '_data' / 'models' / 'gpt2-tiny'}"


def test_the_lessons_come_out_of_an_installed_package(unpacked):
    done = from_wheel(unpacked, "-m", "workbench", "lessons", "out")
    copied = {path.name: path.read_bytes() for path in (unpacked.parent / "out").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in NOTEBOOKS.glob("*.ipynb")}
    assert "jupyter lab out" in done.stdout


def test_the_help_shows_the_command_as_it_was_called(monkeypatch, capsys):
    for called, shown in (("/bin/workbench", "workbench"), ("/x/__main__.py", "python -m")):
        monkeypatch.setattr(sys, "argv", [called])
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        out = capsys.readouterr().out
        assert out.startswith(f"usage: {shown}")
        assert ("python -m workbench" in out) == (shown != "workbench")


WITHOUT_LESSONS = """
import sys
sys.modules.update(dict.fromkeys(["nbformat", "papermill", "ipywidgets", "matplotlib"]))
import workbench
from workbench.__main__ import main
print(main(["notebooks", "lora"]))
for name in ("plots", "Playground"):
    try:
        getattr(workbench, name)
    except workbench.base.errors.UnavailableError as error:
        print(error)
"""


def test_a_command_and_a_name_of_the_front_door_say_which_extra_they_need(unpacked):
    done = from_wheel(unpacked, "-c", WITHOUT_LESSONS)
    needs = (
        "workbench: this needs the package {}, which is not installed. "
        'Install it with: pip install "gpt2-memory-workbench[lessons]"'
    )
    assert done.stderr == f"error: {needs.format('nbformat')}\n"
    assert done.stdout.splitlines() == ["3", needs.format("matplotlib"), needs.format("matplotlib")]


def test_another_missing_package_stays_an_import_error(monkeypatch):
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["torch>=2.11", 'nbformat>=5; extra == "lessons"'])
    assert missing_extra_error(ModuleNotFoundError(name="nbformat.v4"))
    for name in ("torch", "nb", "workbench.nothing", None):
        assert missing_extra_error(ModuleNotFoundError(name=name)) is None
