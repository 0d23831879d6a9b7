"""Run the notebooks headless with papermill. What was executed lies in `build/notebooks`; `make site` shows it."""

import operator
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from nbformat.sign import NotebookNotary
from papermill.exceptions import PapermillExecutionError

from workbench.base.errors import ConfigurationError, WorkbenchError
from workbench.base.launch import Child
from workbench.base.patches import changed_environment
from workbench.base.paths import BUILD, CORPORA, INSTALLED, MODELS, NOTEBOOKS, PACKAGE, PIN, ROOT
from workbench.gpus.emulator.card import DEVICE, emulated_card
from workbench.gpus.emulator.launch import environment as emulated_environment
from workbench.gpus.emulator.place import stub_folder
from workbench.lessons.parameters import check_parameters, of
from workbench.lessons.progress import Progress

DEVICE_PARAMETER = "device"  # of the kernel, not of a notebook
PATIENCE_S = 10.0  # for a lesson that is stopped, whose kernel has to be ended


class NotebookError(WorkbenchError):
    """A cell of a notebook failed."""


def build(
    names: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    force: bool = False,
    folder: Path = BUILD,
    at_once: int = 1,
) -> list[Path]:
    """Execute notebooks into `<folder>/notebooks`. Those up to date are left alone.

    With parameters of one's own they go to `<folder>/notebooks-own` and are always executed.

    Args:
        at_once: so many notebooks at a time, in processes of their own.

    Raises:
        ConfigurationError: unknown notebook or parameter, a value of the wrong type, a secret.
        NotebookError: a notebook failed; those before it are there.
    """
    paths = find_notebooks(names)
    _refuse(paths, parameters or {})
    place = folder / ("notebooks-own" if parameters else "notebooks")
    waiting = []
    for path in paths:
        if force or parameters or not _up_to_date(place / path.name, path):
            waiting.append(path)
    progress = Progress([path.stem for path in waiting], at_once)

    def execute_one(path: Path, call: Callable[..., Path]) -> None:
        began_at_s = time.monotonic()
        call(execute_notebook, path, place / path.name, parameters)
        progress.done(path.stem, time.monotonic() - began_at_s)

    if at_once > 1 and len(waiting) > 1:
        _share(execute_one, waiting, at_once)
    else:
        for path in waiting:
            execute_one(path, operator.call)
    return [place / path.name for path in paths]


def _share(execute_one: Callable[..., None], paths: Sequence[Path], at_once: int) -> None:
    """Let several processes take one notebook after another, until all are executed or one has failed.

    They share the processors: threads of two trainings that wait for each other take ten times as long.
    """
    threads = max((os.cpu_count() or 1) // at_once, 1)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    children = [Child(environment, name="notebook") for _ in range(at_once)]
    left = list(reversed(paths))
    lock = threading.Lock()

    def take_turns(child: Child) -> None:
        while True:
            with lock:
                if not left:
                    return
                path = left.pop()
            execute_one(path, child.call)

    pool = ThreadPoolExecutor(at_once)
    try:
        turns = [pool.submit(take_turns, child) for child in children]
        for turn in wait(turns, return_when=FIRST_EXCEPTION).done:
            turn.result()
    finally:
        left.clear()
        for child in children:
            # a kernel that is at work is ended by its own process, which clears away after it
            child.interrupt()
        wait(turns, timeout=PATIENCE_S)
        for child in children:
            child.close()
        pool.shutdown()


def find_notebooks(names: Iterable[str] = ()) -> list[Path]:
    """The notebooks in their order; names may be stems (`04_lora`), parts of them (`lora`) or paths. No name: all.

    Raises:
        ConfigurationError: a name that fits none.
    """
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    chosen: list[Path] = []
    for name in names:
        fitting = [path for path in paths if name in path.stem or name in (path.name, str(path))]
        if not fitting:
            stems = ", ".join(path.stem for path in paths)
            raise ConfigurationError(f"notebooks: none is called {name!r}. There are: {stems}.")
        chosen += fitting
    return sorted(set(chosen or paths))


def execute_notebook(path: Path, output: Path, parameters: Mapping[str, Any] | None = None) -> Path:
    """Run one notebook in its own folder, as JupyterLab does, into `output`; from a wheel in the folder of `output`.

    Args:
        parameters: names that this notebook does not have are left out. `device="emulated:t4"` is none of the
            notebook's: its kernel then runs on a GPU in software.

    Raises:
        ConfigurationError: a parameter of the wrong type, or one that looks like a secret.
        NotebookError: with the cell's own error, or what ended the kernel; `output` holds what ran until then.
    """
    names = [*of(path), DEVICE_PARAMETER]
    parameters = {name: value for name, value in (parameters or {}).items() if name in names}
    _refuse([path], parameters)
    device = parameters.pop(DEVICE_PARAMETER, "")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.parent if INSTALLED else path.parent
    try:
        with _around_kernel(device):
            papermill.execute_notebook(
                str(path),
                str(output),
                parameters=parameters,
                cwd=str(folder),
                extra_arguments=["--IPKernelApp.log_level=40", f"--IPKernelApp.exec_lines={PIN}"],
                progress_bar=False,
                kernel_name="python3",
                shutdown_kernel="immediate",  # a kernel takes two seconds to end by itself
            )
        reason = _unfinished(output)
    except PapermillExecutionError as error:
        reason = f"{error.ename}: {error.evalue}"
    except DeadKernelError:
        reason = (
            "its kernel died, often for want of memory: choose a smaller model, "
            "batch or length; the marks `completed` are not to be believed"
        )
    if reason:
        begun = 0
        for cell in _cells(output):
            begun += bool(cell.metadata.get("papermill", {}).get("start_time"))
        raise NotebookError(f"{path.name}, cell {begun}: {reason} (see {output})")
    _trust(output)
    return output


def _trust(executed: Path) -> None:
    """As `jupyter trust` does: in place of the pictures of a notebook that was not run there, JupyterLab shows their
    letters, in a row. Where Jupyter cannot keep a signature, that is what is seen."""
    with suppress(OSError, sqlite3.Error):
        notary = NotebookNotary()
        notary.sign(nbformat.read(str(executed), as_version=4))
        notary.store.close()


def _refuse(paths: list[Path], parameters: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a parameter or a device that cannot be used, UnavailableError for what is not set
    up."""
    parameters = dict(parameters)
    device = parameters.pop(DEVICE_PARAMETER, None)
    if device is not None:
        if not isinstance(device, str) or emulated_card(device) is None:
            raise ConfigurationError(
                f"notebooks: device {device!r} cannot be chosen; "
                "a notebook takes the fastest that is there. Only a GPU in software can, "
                f"as in -p device {DEVICE}t4."
            )
        stub_folder()
    check_parameters(paths, parameters)


@contextmanager
def _around_kernel(device: str) -> Iterator[None]:
    """The environment of a kernel that begins here, with an emulated GPU if that is the device.

    A kernel that is ended, or that dies, cannot clear away what it left in its temporary folder.
    """
    card = emulated_card(device)
    variables = emulated_environment(card) if card else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables |= {"TMPDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        try:
            tempfile.tempdir = folder  # where Jupyter writes the ports and the key of the kernel
            with changed_environment(variables):
                yield
        finally:
            tempfile.tempdir = None  # asked for anew


def _up_to_date(executed: Path, notebook: Path) -> bool:
    """Executed to its end, and newer than the notebook, the package, the pins, and the embedded models and texts?"""
    try:
        metadata = nbformat.read(str(executed), as_version=4).metadata
        if metadata.get("papermill", {}).get("exception") or _unfinished(executed):
            return False
    except (OSError, ValueError):  # not there, or cut short
        return False
    sources = [notebook, *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml"), *MODELS.rglob("*"), *CORPORA.rglob("*")]
    if not INSTALLED:
        sources.append(ROOT / "requirements.txt")
    return executed.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def _unfinished(executed: Path) -> str:
    """Why a notebook is not whole: papermill takes `sys.exit(0)` in a cell for success, and a kill leaves what was
    written after the cells before. Empty if it is."""
    waiting = 0
    has_left = False
    for cell in _cells(executed):
        waiting += cell.execution_count is None
        for output in cell.outputs:
            has_left |= output.get("ename") == "SystemExit"
    if waiting or has_left:
        return f"stopped by sys.exit or the like; {waiting} cells after it did not run. Take it out"
    return ""


def _cells(executed: Path) -> list[Any]:
    """The cells with code in them."""
    cells = nbformat.read(str(executed), as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
