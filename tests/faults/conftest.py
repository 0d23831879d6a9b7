"""What every fault is held to: told first and in one line with a cure, before a model loads, and nothing is lost."""

from pathlib import Path

import pytest

from workbench.__main__ import main
from workbench.errors import WorkbenchError
from workbench.recipe import Recipe
from workbench.records.record import Record, Status, read_all
from workbench.run import run as training
from workbench.run.run import run


@pytest.fixture
def earlier(recipe: Recipe, runs_folder: Path) -> Record:
    """A record that must survive whatever happens."""
    record = Record.start(recipe)
    record.save(runs_folder)
    return record


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights may be loaded."""

    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded before the fault was found")

    monkeypatch.setattr(training, "load_model", loaded)


@pytest.fixture
def refused(earlier: Record, no_model: None, runs_folder: Path, capsys: pytest.CaptureFixture[str]):
    """Refuses a recipe through the Python API and a command line; both must say all the words, and nothing else."""

    def check(make_recipe, arguments: list[str], words: tuple[str, ...], code: int = 2) -> None:
        with pytest.raises(WorkbenchError) as caught:
            run(make_recipe(), device="cpu")
        assert caught.value.exit_code == code
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no foreign traceback on top
        capsys.readouterr()
        assert main(["run", *arguments]) == code
        told = capsys.readouterr()
        assert told.out == ""
        first = told.err.splitlines()[0]
        assert first.startswith("error: ")
        for word in words:
            assert word in str(caught.value)
            assert word in first
        found = read_all(runs_folder)
        assert earlier.id in [record.id for record in found]
        assert {record.status for record in found if record.id != earlier.id} <= {Status.UNAVAILABLE}

    return check
