"""Run the notebooks headless with papermill, into `build/notebooks`, which `make site` shows."""

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
from workbench.base.patches import change_environment
from workbench.base.paths import BUILD, CORPORA, INSTALLED, MODELS, NOTEBOOKS, PACKAGE, PIN, ROOT
from workbench.gpus.emulator.card import DEVICE, find_emulated_gpu
from workbench.gpus.emulator.launch import environment as emulated_environment
from workbench.gpus.emulator.place import stub_folder
from workbench.lessons.parameters import check_parameters, parameter_types
from workbench.lessons.progress import Progress

# this parameter is the kernel's, not a notebook's
DEVICE_PARAMETER = "device"
# seconds for a lesson that is stopped to end its kernel
PATIENCE_S = 10.0


class NotebookError(WorkbenchError):
    """A cell of a notebook failed."""


def build(
    names: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    force: bool = False,
    folder: Path = BUILD,
    at_once: int = 1,
) -> list[Path]:
    """Execute notebooks into `<folder>/notebooks`, except those that are up to date, and return the paths of all.

    With parameters they go to `<folder>/notebooks-own` and are always executed.

    Args:
        at_once: the number of notebooks that run at a time, each in a process of its own.

    Raises:
        ConfigurationError: unknown notebook or parameter, a value of the wrong type, a secret.
        NotebookError: a notebook failed; those executed before it stay.
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
        progress.report(path.stem, time.monotonic() - began_at_s)

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
    """Return the paths of notebooks in their order. A name is a stem (`04_lora`), a part of one (`lora`) or a path.

    Without a name, return all.

    Raises:
        ConfigurationError: a name fits no notebook.
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
        parameters: values by name; names that this notebook does not have are left out. `device="emulated:t4"` is no
            parameter of a notebook: its kernel then runs on an emulated GPU.

    Raises:
        ConfigurationError: a parameter of the wrong type, or one that looks like a secret.
        NotebookError: a cell failed, or the kernel ended; `output` has the cells that ran until then.
    """
    names = [*parameter_types(path), DEVICE_PARAMETER]
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
        reason = _why_unfinished(output)
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
    """Sign an executed notebook, as `jupyter trust` does.

    In a notebook that is not trusted JupyterLab shows the bare labels of a picture. If Jupyter cannot keep a signature,
    the notebook stays untrusted.
    """
    with suppress(OSError, sqlite3.Error):
        notary = NotebookNotary()
        notary.sign(nbformat.read(str(executed), as_version=4))
        notary.store.close()


def _refuse(paths: list[Path], parameters: Mapping[str, Any]) -> None:
    """Refuse parameters and a device that cannot be used.

    Raises:
        ConfigurationError: a parameter or the device is unknown or unfit.
        UnavailableError: the emulator is not set up, or the model cannot be had.
    """
    parameters = dict(parameters)
    device = parameters.pop(DEVICE_PARAMETER, None)
    if device is not None:
        if not isinstance(device, str) or find_emulated_gpu(device) is None:
            raise ConfigurationError(
                f"notebooks: device {device!r} cannot be chosen; "
                "a notebook takes the fastest that is there. Only a GPU in software can, "
                f"as in -p device {DEVICE}t4."
            )
        stub_folder()
    check_parameters(paths, parameters)


@contextmanager
def _around_kernel(device: str) -> Iterator[None]:
    """Set the environment for a kernel that starts meanwhile, with an emulated GPU if that is the device.

    A kernel that is ended, or that dies, cannot clear away what it left in its temporary folder.
    """
    card = find_emulated_gpu(device)
    variables = emulated_environment(card) if card else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables |= {"TMPDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        try:
            # Jupyter writes the ports and the key of the kernel into this folder
            tempfile.tempdir = folder
            with change_environment(variables):
                yield
        finally:
            tempfile.tempdir = None  # tempfile finds the folder of the system again


def _up_to_date(executed: Path, notebook: Path) -> bool:
    """Whether a notebook was executed to its end, after all changes of it, the package, the pins, models and texts."""
    try:
        metadata = nbformat.read(str(executed), as_version=4).metadata
        if metadata.get("papermill", {}).get("exception") or _why_unfinished(executed):
            return False
    except (OSError, ValueError):  # the file is missing, or cut short
        return False
    sources = [notebook, *PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.toml"), *MODELS.rglob("*"), *CORPORA.rglob("*")]
    if not INSTALLED:
        sources.append(ROOT / "requirements.txt")
    return executed.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def _why_unfinished(executed: Path) -> str:
    """Say why a notebook was not executed to its end; empty if it was.

    papermill takes `sys.exit(0)` in a cell for success, and a killed papermill leaves a file without the later outputs.
    """
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
    """Return the cells that have code."""
    cells = nbformat.read(str(executed), as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
