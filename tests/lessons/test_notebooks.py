import os

import nbformat
import pytest

from workbench.errors import ConfigurationError
from workbench.lessons import parameters
from workbench.lessons.notebooks import (
    NotebookError,
    build,
    execute_notebook,
    find_notebooks,
    title,
    to_html,
    write_index,
)


@pytest.fixture
def notebook(tmp_path):
    """Makes a notebook of the given cells; strings that start with `#` are Markdown."""

    def make(*sources, name="lesson.ipynb"):
        book = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        )
        parameters = nbformat.v4.new_code_cell("steps: int = 1  # steps", metadata={"tags": ["parameters"]})
        book.cells = [parameters]
        for source in sources:
            new = nbformat.v4.new_markdown_cell if source.startswith("#") else nbformat.v4.new_code_cell
            book.cells.append(new(source))
        path = tmp_path / name
        nbformat.write(book, path)
        return path

    return make


def test_notebooks_are_found_in_order_by_stem_or_part():
    stems = [path.stem for path in find_notebooks()]
    assert stems == sorted(stems)
    assert stems[0] == "00_memory_anatomy"
    assert stems[-2:] == ["99_compare", "playground"]
    assert [path.stem for path in find_notebooks(["compare", "00_memory_anatomy"])] == [
        "00_memory_anatomy",
        "99_compare",
    ]


def test_an_unknown_notebook_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="none is called 'nope'. There are: 00_memory_anatomy"):
        find_notebooks(["nope"])


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigurationError, match="no parameter is called 'stepz'. There are: .*steps"):
        build(["lora"], {"stepz": 3}, folder=tmp_path)
    assert not list(tmp_path.rglob("*.ipynb"))


def test_parameters_reach_the_cells(notebook, tmp_path):
    path = notebook("print('steps are', steps)")
    assert parameters.of(path) == {"steps": "int"}
    parameters.check_parameters([path], {"steps": 7})
    output = execute_notebook(path, tmp_path / "new" / "out.ipynb", {"steps": 7, "unknown to this one": 1})
    assert "steps are 7" in str(nbformat.read(str(output), as_version=4).cells)


def test_the_kernel_works_in_the_notebooks_folder(notebook, tmp_path):
    path = notebook("import os; print('at', os.getcwd())")
    output = execute_notebook(path, tmp_path / "elsewhere" / "out.ipynb")
    assert f"at {tmp_path}" in str(nbformat.read(str(output), as_version=4).cells)


def test_from_a_wheel_the_kernel_works_beside_the_output(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.lessons.notebooks.INSTALLED", True)
    path = notebook("import os; print('at', os.getcwd())")
    output = execute_notebook(path, tmp_path / "elsewhere" / "out.ipynb")
    assert f"at {tmp_path / 'elsewhere'}" in str(nbformat.read(str(output), as_version=4).cells)


def test_a_failing_cell_is_reported_and_what_ran_is_kept(notebook, tmp_path):
    path = notebook("print('so far')", "1 / 0")
    with pytest.raises(NotebookError, match=r"lesson.ipynb, cell \d: ZeroDivisionError: division by zero"):
        execute_notebook(path, tmp_path / "out.ipynb")
    assert "so far" in (tmp_path / "out.ipynb").read_text()


def test_a_page_shows_formulas_without_a_network(notebook, tmp_path):
    path = notebook("# A title\n\nFor $x^2$ and\n\n$$\\frac{a}{b}$$\n\nbut not `$HOME`", "1 + 1")
    page = to_html(path, tmp_path / "page.html").read_text()
    assert "<msup>" in page
    assert "<mfrac>" in page
    assert "<code>$HOME</code>" in page
    assert "mathjax" not in page.lower()
    assert "<title>A title</title>" in page
    assert "prefers-color-scheme: dark" in page


def test_the_index_links_every_page_and_escapes_titles(notebook, tmp_path):
    to_html(notebook("# Bytes & <b>bits</b>", name="a.ipynb"), tmp_path / "gallery" / "a.html")
    index = write_index(tmp_path / "gallery").read_text()
    assert 'href="a.html"' in index
    assert "<b>bits" not in index


def test_what_is_up_to_date_is_left_alone(notebook, tmp_path, monkeypatch):
    path = notebook("print(1)")
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    (page,) = build(folder=tmp_path / "build")
    first = page.stat().st_mtime_ns
    build(folder=tmp_path / "build")
    assert page.stat().st_mtime_ns == first
    os.utime(path, (page.stat().st_mtime + 1,) * 2)
    build(folder=tmp_path / "build")
    assert page.stat().st_mtime_ns > first


def test_pages_with_parameters_of_ones_own_do_not_mix_with_the_gallery(notebook, tmp_path, monkeypatch):
    notebook("print(steps)")
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    (page,) = build(given={"steps": 5}, folder=tmp_path / "build")
    assert page.parent.name == "gallery-own"
    assert not (tmp_path / "build" / "gallery").exists()


def test_title_falls_back_to_the_stem(notebook):
    assert title(notebook("print(1)")) == "lesson"
