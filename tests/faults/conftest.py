"""What every fault is held to: told first and in one line with a cure, before a model loads, and nothing is lost."""

from collections.abc import Callable
from pathlib import Path

import pytest

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.journal.record import Record, Status, read_all
from workbench.models import load
from workbench.recipe import Recipe
from workbench.training.run import run


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

    monkeypatch.setattr(load, "load_model", loaded)


@pytest.fixture
def refused(
    earlier: Record, no_model: None, runs_folder: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], Recipe], list[str], tuple[str, ...]], None]:
    """A function that asks for a recipe through the Python API and on a command line: both must refuse it, say all
    the reasons, and nothing else."""

    def check(make_recipe: Callable[[], Recipe], arguments: list[str], reasons: tuple[str, ...]) -> None:
        with pytest.raises(ConfigurationError) as caught:
            run(make_recipe(), device="cpu")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None  # no foreign traceback on top
        capsys.readouterr()
        assert main(["run", *arguments]) == ConfigurationError.exit_code == 2
        output = capsys.readouterr()
        assert output.out == ""
        first_line = output.err.splitlines()[0]
        assert first_line.startswith("error: ")
        for reason in reasons:
            assert reason in str(caught.value)
            assert reason in first_line
        records = read_all(runs_folder)
        assert earlier.id in [record.id for record in records]
        assert {record.status for record in records if record.id != earlier.id} <= {Status.UNAVAILABLE}

    return check
