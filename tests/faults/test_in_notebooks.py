"""The faults of texts, models and arguments once more, in the cells of a notebook that papermill runs."""

from dataclasses import dataclass

import nbformat
import pytest
from test_model import ARGUMENTS, TECHNIQUES
from test_model import FAULTS as MODELS
from test_text import FAULTS as TEXTS

from workbench.__main__ import main
from workbench.lessons.notebooks import NotebookError, execute_notebook
from workbench.records.record import Status, read_all

SETUP = """from dataclasses import replace
from workbench import Recipe, run, techniques
recipe = Recipe(model={model!r}, corpus={corpus!r}, effective_batch_size=8, sequence_length=32, steps=1)"""


@dataclass(frozen=True)
class Fault:
    cell: str
    words: tuple[str, ...]


@pytest.fixture
def faults(tmp_path) -> dict[str, Fault]:
    """Every row with a folder of its own for its files, and the cell of a user who meets it."""

    def made(make, name):
        folder = tmp_path / "own" / name
        folder.mkdir(parents=True)
        return repr(make(folder))

    run = "run({}, device='cpu')".format
    return {
        **{
            f"corpus {name}": Fault(run(f"replace(recipe, corpus={made(make, f'corpus {n}')})"), ("corpus: ", *words))
            for n, (name, (make, words)) in enumerate(TEXTS.items())
        },
        **{
            f"model {name}": Fault(run(f"replace(recipe, model={made(make, f'model {n}')})"), ("model: ", *words))
            for n, (name, (make, words)) in enumerate(MODELS.items())
        },
        **{
            f"argument {name}": Fault(f"from math import inf, nan\n{run(f'replace(recipe, **{fields})')}", (words,))
            for name, (fields, _, words) in ARGUMENTS.items()
        },
        **{
            f"technique {name}": Fault(run(f"recipe | techniques.parse_technique({text!r})"), (words,))
            for name, (text, words) in TECHNIQUES.items()
        },
    }


@pytest.fixture
def write(tmp_path, recipe):
    """A notebook of the setup and some cells; those that may fail without ending it are tagged as such."""

    def written(cells, tags=()):
        book = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        )
        sources = ["steps: int = 1", SETUP.format(model=recipe.model, corpus=recipe.corpus), *cells]
        book.cells = [nbformat.v4.new_code_cell(source) for source in sources]
        book.cells[0].metadata["tags"] = ["parameters"]
        for cell in book.cells[2:]:
            cell.metadata["tags"] = list(tags)
        nbformat.write(book, tmp_path / "lesson.ipynb")
        return tmp_path / "lesson.ipynb"

    return written


def test_each_cell_tells_its_own_first_and_alone(faults, write, tmp_path, earlier, runs_folder):
    path = write([fault.cell for fault in faults.values()], tags=["raises-exception"])
    with pytest.raises(NotebookError):
        execute_notebook(path, tmp_path / "out.ipynb")
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    outputs = [cell.outputs for cell in executed.cells if cell.cell_type == "code"][-len(faults) :]
    for (name, fault), (error,) in zip(faults.items(), outputs, strict=True):
        assert error.get("ename") in ("ConfigurationError", "UnavailableError"), (name, error)
        for word in fault.words:
            assert word in error.evalue, name
        assert not any("another exception" in line or "direct cause" in line for line in error.traceback), name
    found = read_all(runs_folder)
    assert earlier.id in [record.id for record in found]
    assert {record.status for record in found if record.id != earlier.id} <= {Status.UNAVAILABLE}


def test_the_command_ends_with_code_1_and_keeps_what_ran(faults, write, tmp_path, monkeypatch, capsys):
    fault = faults["corpus no text column"]
    write(["print('so far')", fault.cell, "print('never')"])
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", None))
    assert main(["notebooks", "lesson"]) == 1
    told = capsys.readouterr().err
    for word in ("error: lesson.ipynb, cell 4: ConfigurationError: ", *fault.words):
        assert word in told
    assert "so far" in (tmp_path / "build" / "notebooks" / "lesson.ipynb").read_text()
