"""Faults of texts, models and arguments, some of each kind, in the cells of a notebook that papermill runs."""

from dataclasses import dataclass

import nbformat
import pytest
from test_model import ARGUMENTS, TECHNIQUES
from test_model import FAULTS as MODELS
from test_text import FAULTS as TEXTS

from workbench.__main__ import main
from workbench.journal.record import Status, read_all
from workbench.lessons.notebooks import NotebookError, execute_notebook

pytestmark = pytest.mark.dear  # starts Jupyter kernels
SETUP = """from dataclasses import replace
from workbench import Recipe, run, techniques
recipe = Recipe(model={model!r}, corpus={corpus!r}, effective_batch_size=8, sequence_length=32, steps=1)"""


@dataclass(frozen=True)
class Fault:
    cell: str
    reasons: tuple[str, ...]


OF_EACH_KIND = 3


@pytest.fixture
def faults(tmp_path) -> dict[str, Fault]:
    """The first ones of each kind, with a folder of its own for the files of each, and the cell of a user who meets
    it. All of them, through the Python API: test_text.py, test_model.py."""

    def own(make, place):
        folder = tmp_path / "own" / place
        folder.mkdir(parents=True)
        return repr(make(folder))

    def some(table):
        return list(table.items())[:OF_EACH_KIND]

    run = "run({}, device='cpu')".format
    rows = {}
    for kind, table in TEXTS.items():
        for number, (name, (make, *reasons)) in enumerate(some(table)):
            cell = run(f"replace(recipe, corpus={own(make, f'{kind} {number}')})")
            rows[f"corpus {name}"] = Fault(cell, ("corpus: ", *reasons))
    for number, (name, (make, reasons)) in enumerate(MODELS.items()):
        cell = run(f"replace(recipe, model={own(make, f'model {number}')})")
        rows[f"model {name}"] = Fault(cell, ("model: ", *reasons))
    for name, (fields, _, reason) in some(ARGUMENTS):
        rows[f"argument {name}"] = Fault(run(f"replace(recipe, **{fields})"), (reason,))
    for name, (setting, reason) in some(TECHNIQUES):
        cell = run(f"recipe | techniques.parse_technique({setting!r})")
        rows[f"technique {name}"] = Fault(cell, (reason,))
    return rows


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


def test_each_cell_tells_its_own_first_and_alone(faults, write, tmp_path, earlier, runs_folder, subtests):
    path = write([fault.cell for fault in faults.values()], tags=["raises-exception"])
    with pytest.raises(NotebookError):
        execute_notebook(path, tmp_path / "out.ipynb")
    executed = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    outputs = [cell.outputs for cell in executed.cells if cell.cell_type == "code"][-len(faults) :]
    for (name, fault), outputs_of_cell in zip(faults.items(), outputs, strict=True):
        with subtests.test(name):
            (error,) = outputs_of_cell
            assert error.get("ename") in ("ConfigurationError", "UnavailableError")
            for reason in fault.reasons:
                assert reason in error.evalue
            assert not any("another exception" in line or "direct cause" in line for line in error.traceback)
    records = read_all(runs_folder)
    assert earlier.id in [record.id for record in records]
    assert {record.status for record in records if record.id != earlier.id} <= {Status.UNAVAILABLE}


def test_the_command_ends_with_code_1_and_keeps_what_ran(faults, write, tmp_path, monkeypatch, capsys):
    fault = faults["corpus header only"]
    write(["print('so far')", fault.cell, "print('never')"])
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", 1))
    assert main(["notebooks", "lesson"]) == 1
    message = capsys.readouterr().err
    for reason in ("error: lesson.ipynb, cell 4: ConfigurationError: ", *fault.reasons):
        assert reason in message
    assert "so far" in (tmp_path / "build" / "notebooks" / "lesson.ipynb").read_text()
