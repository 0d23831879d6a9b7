import nbformat
import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.paths import NOTEBOOKS
from workbench.lessons.copies import copy_lessons

NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def test_all_notebooks_and_nothing_else_are_copied(tmp_path):
    assert copy_lessons(tmp_path) == len(NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == NAMES
    nbformat.validate(nbformat.read(str(tmp_path / NAMES[0]), as_version=4))


def test_a_changed_notebook_is_not_overwritten_and_the_others_stay_away(tmp_path):
    (tmp_path / NAMES[3]).write_text("mine")
    with pytest.raises(ConfigurationError, match=rf"lessons: .* {NAMES[3]}, .* nothing was copied.*--force"):
        copy_lessons(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAMES[3]]
    assert (tmp_path / NAMES[3]).read_text() == "mine"


def test_equal_notebooks_are_no_hindrance_and_other_files_are_left_alone(tmp_path):
    copy_lessons(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert copy_lessons(tmp_path) == len(NAMES)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_command_copies_refuses_and_forces(tmp_path, capsys):
    folder = str(tmp_path / "out put")
    assert main(["lessons", folder]) == 0
    assert (
        f"{len(NAMES)} notebooks copied to {folder}. Open them with: jupyter lab '{folder}'" in capsys.readouterr().out
    )
    (tmp_path / "out put" / NAMES[0]).write_text("mine")
    assert main(["lessons", folder]) == 2
    assert capsys.readouterr().err.startswith(f"error: lessons: {folder} has other contents in {NAMES[0]}")
    assert main(["lessons", folder, "--force"]) == 0
    assert (tmp_path / "out put" / NAMES[0]).read_bytes() == (NOTEBOOKS / NAMES[0]).read_bytes()


def test_a_file_is_no_folder(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["lessons", str(tmp_path / "out")]) == 2
    assert "it cannot be a folder (File exists). Name another one." in capsys.readouterr().err
