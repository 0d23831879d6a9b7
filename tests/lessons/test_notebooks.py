import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout, suppress
from io import StringIO

import nbformat
import papermill
import psutil
import pytest
from nbformat.sign import NotebookNotary
from papermill.engines import Engine, NBClientEngine, papermill_engines

from workbench.__main__ import main
from workbench.base.errors import ConfigurationError
from workbench.base.launch import Child
from workbench.base.paths import PACKAGE, runs_folder
from workbench.lessons import parameters
from workbench.lessons.notebooks import (
    NotebookError,
    _around_kernel,
    build,
    execute_notebook,
    find_notebooks,
)
from workbench.lessons.progress import Progress


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


class InThisProcess(Engine):
    """Executes the cells here: a kernel takes seconds to start, and all around it is papermill's and ours."""

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, **options):
        names, number = {}, 0
        for index, cell in enumerate(nb_man.nb.cells):
            if cell.cell_type != "code":
                continue
            number += 1
            nb_man.cell_start(cell, index)
            cell.execution_count = number
            printed, failure = StringIO(), None
            try:
                with redirect_stdout(printed):
                    exec(cell.source, names)
            except Exception as error:
                failure = error
            cell.outputs.append(nbformat.v4.new_output("stream", text=printed.getvalue()))
            if failure is not None:
                ename = type(failure).__name__
                cell.outputs.append(nbformat.v4.new_output("error", ename=ename, evalue=str(failure)))
                nb_man.cell_exception(cell, index, exception=failure)
                return
            nb_man.cell_complete(cell, index)


@pytest.fixture
def without_kernels():
    papermill_engines.register(None, InThisProcess)
    yield
    papermill_engines.register(None, NBClientEngine)


def output_of(executed):
    """What the cells of an executed notebook have printed."""
    cells = nbformat.read(str(executed), as_version=4).cells
    return "".join(output.text for cell in cells for output in cell.get("outputs", []) if "text" in output)


def test_notebooks_are_found_in_order_by_stem_or_part():
    stems = [path.stem for path in find_notebooks()]
    assert stems == sorted(stems)
    assert stems[0] == "00_memory_anatomy"
    assert stems[-3:] == ["99_compare", "99b_pairs", "playground"]
    assert [path.stem for path in find_notebooks(["compare", "00_memory_anatomy"])] == [
        "00_memory_anatomy",
        "99_compare",
    ]


def test_an_unknown_notebook_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match="none is called 'nope'. There are: 00_memory_anatomy"):
        find_notebooks(["nope"])


def test_an_unknown_parameter_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no parameter 'stepz'\. Known: .* Did you mean steps\?"):
        build(["lora"], {"stepz": 3}, folder=tmp_path)
    assert not list(tmp_path.rglob("*.ipynb"))


def test_parameters_reach_the_cells(notebook, tmp_path, without_kernels):
    path = notebook("print('steps are', steps)")
    assert parameters.parameter_types(path) == {"steps": "int"}
    parameters.check_parameters([path], {"steps": 7})
    output = execute_notebook(path, tmp_path / "new" / "out.ipynb", {"steps": 7, "unknown to this one": 1})
    assert output_of(output) == "steps are 7\n"


def test_the_cells_work_in_the_notebooks_folder(notebook, tmp_path, without_kernels):
    path = notebook("import os; print('at', os.getcwd())")
    assert output_of(execute_notebook(path, tmp_path / "elsewhere" / "out.ipynb")) == f"at {tmp_path}\n"


def test_from_a_wheel_the_cells_work_beside_the_output(notebook, tmp_path, monkeypatch, without_kernels):
    monkeypatch.setattr("workbench.lessons.notebooks.INSTALLED", True)
    path = notebook("import os; print('at', os.getcwd())")
    output = execute_notebook(path, tmp_path / "elsewhere" / "out.ipynb")
    assert output_of(output) == f"at {tmp_path / 'elsewhere'}\n"


def test_what_was_executed_here_is_trusted_so_that_jupyterlab_shows_its_pictures(
    notebook, tmp_path, monkeypatch, without_kernels
):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    output = execute_notebook(notebook("print(1)"), tmp_path / "out.ipynb")
    assert NotebookNotary().check_signature(nbformat.read(str(output), as_version=4))
    assert not NotebookNotary().check_signature(nbformat.read(str(tmp_path / "lesson.ipynb"), as_version=4))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "file"))  # where nothing can be kept
    assert output_of(execute_notebook(notebook("print(1)"), tmp_path / "other.ipynb")) == "1\n"


def test_a_failing_cell_is_reported_and_what_ran_is_kept(notebook, tmp_path, without_kernels):
    path = notebook("print('so far')", "1 / 0", "print('never')")
    with pytest.raises(NotebookError, match=r"lesson.ipynb, cell 4: ZeroDivisionError: division by zero \(see .*out"):
        execute_notebook(path, tmp_path / "out.ipynb", {"steps": 2})  # the injected cell is the second
    assert output_of(tmp_path / "out.ipynb") == "so far\n"


@pytest.fixture
def chosen_again(tmp_path, monkeypatch, without_kernels):
    """Builds the notebooks of `tmp_path` once; returns what then says which of them a build would execute again."""
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    with suppress(NotebookError):
        build(folder=tmp_path / "build")
    begun = []
    monkeypatch.setattr("workbench.lessons.notebooks.execute_notebook", lambda path, *_, **__: begun.append(path.stem))

    def chosen(**options):
        begun.clear()
        build(folder=tmp_path / "build", **options)
        return list(begun)

    return chosen


@pytest.fixture
def two(notebook):
    """`a` runs, `b` fails in its last cell."""
    notebook("print(1)", name="a.ipynb")
    notebook("1 / 0", name="b.ipynb")


def test_what_is_up_to_date_is_left_alone_and_what_failed_is_not(two, chosen_again, tmp_path):
    executed = tmp_path / "build" / "notebooks" / "a.ipynb"
    assert chosen_again() == ["b"]
    assert chosen_again(names=["a"], force=True) == ["a"]
    whole = executed.read_text()
    begun = nbformat.reads(whole, as_version=4)
    begun.cells[-1].execution_count = None
    for left_by_a_kill in (whole[: len(whole) // 2], "", nbformat.writes(begun)):
        executed.write_text(left_by_a_kill)
        assert chosen_again(names=["a"]) == ["a"]
    executed.write_text(whole)
    assert chosen_again(names=["a"]) == []
    os.utime(tmp_path / "a.ipynb", (executed.stat().st_mtime + 1,) * 2)
    assert chosen_again(names=["a"]) == ["a"]


def test_those_with_parameters_of_ones_own_do_not_mix_with_the_others(notebook, tmp_path, monkeypatch, without_kernels):
    notebook("print(steps)")
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    (executed,) = build(parameters={"steps": 5}, folder=tmp_path / "build")
    assert executed == tmp_path / "build" / "notebooks-own" / "lesson.ipynb"
    assert not (tmp_path / "build" / "notebooks").exists()


# ---- several at a time, and how far they are ----


@pytest.fixture
def three(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    for name in "abc":
        source = f"import os\nopen('{name}', 'w').write(f'{{os.getppid()}} {{os.environ[\"OMP_NUM_THREADS\"]}}')"
        notebook(source, name=f"{name}.ipynb")


@pytest.mark.dear
def test_two_at_a_time_are_two_processes_that_share_the_processors(three, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    executed = build(folder=tmp_path / "build", at_once=2)
    assert [path.name for path in executed] == ["a.ipynb", "b.ipynb", "c.ipynb"]
    written = [(tmp_path / name).read_text().split() for name in "abc"]
    assert len({process for process, _ in written}) == 2
    assert {threads for _, threads in written} == {"3"}
    assert "3 of 3" in capsys.readouterr().out


@pytest.mark.dear
def test_one_that_fails_among_several_ends_all_and_says_which(three, notebook, tmp_path):
    notebook("1 / 0", name="a.ipynb")
    notebook("import time\ntime.sleep(60)", name="b.ipynb")
    began_at_s = time.monotonic()
    with pytest.raises(NotebookError, match="a.ipynb, cell 2: ZeroDivisionError"):
        build(folder=tmp_path / "build", at_once=2)
    assert time.monotonic() - began_at_s < 40
    assert not (tmp_path / "c").exists()


def test_progress_counts_down_in_proportion_to_what_was_timed_once(tmp_path, monkeypatch, capsys):
    times = tmp_path / "lessons.csv"
    times.write_text("lesson,runs,seconds\n01_a,2,10\n02_b,4,20\n03_c,6,30\n")
    monkeypatch.setattr("workbench.lessons.progress.TIMES", times)
    progress = Progress(["01_a", "02_b", "03_c", "04_new"], at_once=2)
    progress.report("01_a", 20.0)  # twice as slow as in the table
    assert "1 of 4; left: about 14 runs and 70 s" in capsys.readouterr().out
    for name in ("03_c", "04_new", "02_b"):
        progress.report(name, 1.0)
    assert capsys.readouterr().out.endswith("4 of 4\n")


# ---- the kernel imports what the command is ----


@pytest.mark.dear
def test_the_kernel_and_its_children_import_this_very_package(notebook, tmp_path, monkeypatch):
    """Whatever else is called workbench where the kernel stands, on PYTHONPATH, or in an editable install. The kernel
    stands in the notebook's folder, and has its parameters."""
    for other in (tmp_path, tmp_path / "on path"):
        (other / "workbench").mkdir(parents=True)
        (other / "workbench" / "__init__.py").write_text("raise ImportError('another checkout')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", str(tmp_path / "on path")]))
    path = notebook(
        "import os\nprint('at', os.getcwd(), steps)",
        "import workbench\nprint('package', workbench.__file__)",
        "import workbench.recipe\nprint('room', workbench.recipe.__file__)",
        "from workbench.base.launch import Child\nfrom workbench.base.paths import runs_folder\n"
        "worker = Child(os.environ, ['workbench.base.paths'])\n"
        "print('child', worker.call(runs_folder))\nworker.close()",
    )
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "here"))
    shown = output_of(execute_notebook(path, tmp_path / "elsewhere" / "out.ipynb", {"steps": 7}))
    assert f"at {tmp_path} 7\n" in shown
    assert f"package {PACKAGE / '__init__.py'}" in shown
    assert f"room {PACKAGE / 'recipe.py'}" in shown
    assert f"child {tmp_path / 'here'}" in shown
    assert "another checkout" not in shown


def test_a_worker_imports_this_very_package(tmp_path, monkeypatch):
    (tmp_path / "workbench").mkdir()
    (tmp_path / "workbench" / "__init__.py").write_text("raise ImportError('another checkout')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    worker = Child(os.environ, ["workbench.base.paths"])
    try:
        assert worker.call(runs_folder) == runs_folder()
    finally:
        worker.close()


# ---- what a run of a notebook leaves ----


@pytest.mark.dear
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_command_that_is_ended_leaves_no_folder_no_connection_file_and_no_kernel(
    notebook, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", 1))
    notebook("import os\nopen('begun', 'w').write(str(os.getpid()))\nimport time\ntime.sleep(60)")
    seen = []

    def end():
        while not ((tmp_path / "begun").exists() and (tmp_path / "begun").read_text()):
            time.sleep(0.02)
        seen.extend([psutil.Process(int((tmp_path / "begun").read_text())), *(tmp_path / "temporary").rglob("*.json")])
        os.kill(os.getpid(), getattr(signal, name))

    handlers = {
        signal.SIGTERM: lambda *_: pytest.fail("SIGTERM would have ended the process at once"),
        signal.SIGINT: signal.default_int_handler,  # a job in the background ignores it
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        threading.Thread(target=end, daemon=True).start()
        assert main(["notebooks", "lesson"]) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(seen) == 2, "the connection file is not where it was looked for"
    assert not seen[0].is_running() or seen[0].status() == psutil.STATUS_ZOMBIE
    assert list((tmp_path / "temporary").iterdir()) == []


def test_sigterm_ends_the_command_as_ctrl_c_does_and_the_temporary_folder_goes(
    notebook, tmp_path, monkeypatch, without_kernels
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", 1))
    notebook(
        "import tempfile\nprint('in', tempfile.gettempdir())",
        "import os\nimport signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time\ntime.sleep(1)",
    )
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM would have ended the process at once"))
    try:
        assert main(["notebooks", "lesson"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert output_of(tmp_path / "build" / "notebooks" / "lesson.ipynb").startswith(f"in {temporary}/")
    assert list(temporary.iterdir()) == []


def test_afterwards_everything_is_as_it_was():
    before, place = dict(os.environ), tempfile.gettempdir()
    with _around_kernel(""):
        assert os.environ["TMPDIR"] == tempfile.gettempdir() != place
    assert (dict(os.environ), tempfile.gettempdir()) == (before, place)


def test_a_disk_that_refuses_is_told_with_its_cure(notebook, tmp_path, monkeypatch, capsys):
    notebook("1")
    monkeypatch.setattr("workbench.lessons.notebooks.NOTEBOOKS", tmp_path)
    monkeypatch.setattr("workbench.lessons.notebooks.build.__defaults__", ((), None, False, tmp_path / "build", 1))

    def refuses(path, output, **_):
        raise OSError(28, "No space left on device", output)

    monkeypatch.setattr(papermill, "execute_notebook", refuses)
    assert main(["notebooks", "lesson"]) == 1
    executed = tmp_path / "build" / "notebooks" / "lesson.ipynb"
    assert f"error: {executed}: No space left on device. Make room" in capsys.readouterr().err


# ---- what is refused before a kernel starts ----


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, **__: pytest.fail("a kernel was started"))


REFUSED_PARAMETERS = (
    ("lora", {"model": "./nope"}, "model: './nope' is neither an existing folder nor a hub id"),
    ("lora", {"model": ""}, "notebooks: model must be a text, not empty"),
    ("18b", {"model": "./nope"}, "model: './nope' is neither"),
    ("lora", {"corpus": "nope.txt"}, "corpus: there is no file 'nope.txt'"),
    ("lora", {"device": "cuda"}, "notebooks: device 'cuda' cannot be chosen"),
    ("lora", {"device": "emulated:nope"}, "gpu: there is no 'nope'"),
    ("playground", {"gpu": "nope"}, "gpu: there is no 'nope'"),
    ("lora", {"rank": 0}, "notebooks: rank must be an integer of at least 1, got 0"),
    ("planner", {"share": -1.0}, "notebooks: share must be a number of at least 0, got -1.0"),
    ("planner", {"share": float("nan")}, "notebooks: share must be a number of at least 0, got nan"),
    ("planner", {"share": float("inf")}, "notebooks: share must be a number of at least 0, got inf"),
    ("lora", {"seeds": 0}, "notebooks: seeds must be an integer of at least 1, got 0"),
    ("lora", {"steps": -3}, "notebooks: steps must be an integer of at least 1, got -3"),
    ("lora", {"effective_batch_size": 0}, "notebooks: effective_batch_size must be an integer of at least 1"),
    (
        "gradient_accumulation",
        {"micro_batches": 0},
        "notebooks: micro_batches must be an integer of at least 1, got 0",
    ),
    ("chunked", {"chunk": 0}, "notebooks: chunk must be an integer of at least 1"),
)


def test_what_a_cell_would_refuse(no_kernel, tmp_path, subtests):
    for name, given, words in REFUSED_PARAMETERS:
        with subtests.test(notebook=name, given=given):
            with pytest.raises(ConfigurationError) as built:
                build([name], given, folder=tmp_path / "build")
            with pytest.raises(ConfigurationError) as executed:
                execute_notebook(find_notebooks([name])[0], tmp_path / "out.ipynb", given)
            assert str(built.value).startswith(words)
            assert str(executed.value).startswith(words)
            assert list(tmp_path.iterdir()) == []


def test_records_that_could_not_be_written(no_kernel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file" / "runs"))
    with pytest.raises(
        ConfigurationError, match=r"folder: nothing can be written into .*\(Not a directory\).*WORKBENCH"
    ):
        build(["lora"], folder=tmp_path / "build")
