"""Run the notebooks headless with papermill. What was executed lies in `build/notebooks`; `make site` shows it."""

import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbformat
import papermill
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from workbench.errors import ConfigurationError, WorkbenchError
from workbench.gpus.emulator.card import DEVICE, emulated_card
from workbench.gpus.emulator.launch import environment
from workbench.gpus.emulator.place import stub_folder
from workbench.lessons import parameters
from workbench.paths import BUILD, DATA, INSTALLED, NOTEBOOKS, PACKAGE, PIN, ROOT
from workbench.run.world import refuse_several_ranks

DEVICE_PARAMETER = "device"

# predictions come from a process of their own, which can load its libraries while the kernel loads the same
PREPARE = f"{PIN}; from workbench.predict.worker import warm_predictions as _start; _start('t4'); del _start"


class NotebookError(WorkbenchError):
    """A cell of a notebook failed."""


def find_notebooks(names: Iterable[str] = ()) -> list[Path]:
    """The notebooks in their order; names may be stems (`04_lora`), parts of them (`lora`) or paths.

    Raises:
        ConfigurationError: a name that fits none.
    """
    every, chosen = sorted(NOTEBOOKS.glob("*.ipynb")), set()
    for name in names:
        fitting = [path for path in every if name in (path.stem, path.name, str(path)) or name in path.stem]
        if not fitting:
            known = ", ".join(path.stem for path in every)
            raise ConfigurationError(f"notebooks: none is called {name!r}. There are: {known}.")
        chosen.update(fitting)
    return [path for path in every if path in chosen or not chosen]


def execute_notebook(
    path: Path, output: Path, given: Mapping[str, Any] | None = None, timeout_s: int | None = None
) -> Path:
    """Run one notebook in its own folder, as JupyterLab does, into `output`; from a wheel in the folder of `output`.

    Args:
        given: parameters; names that this notebook does not have are left out. `device="emulated:t4"` is none of the
            notebook's: its kernel then runs on a GPU in software.
        timeout_s: for each cell; none by default.

    Raises:
        ConfigurationError: a parameter of the wrong type, or one that looks like a secret.
        NotebookError: with the cell's own error, or what ended the kernel; `output` holds what ran until then.
    """
    given, known = parameters.plain(given or {}), parameters.of(path)
    _refuse_here(given.get(DEVICE_PARAMETER), timeout_s)
    accepted = {name: value for name, value in given.items() if name in known}
    parameters.check_parameters([path], accepted)
    try:
        with _writing(output), _around_kernel(given.get(DEVICE_PARAMETER)):
            papermill.execute_notebook(
                str(path), str(output), parameters=accepted, cwd=str(output.parent if INSTALLED else path.parent),
                extra_arguments=["--IPKernelApp.log_level=40", f"--IPKernelApp.exec_lines={PREPARE}"],
                progress_bar=False, kernel_name="python3", execution_timeout=timeout_s,
                shutdown_kernel="immediate",  # a kernel takes two seconds to end by itself
            )  # fmt: skip
        cell, why = _last_cell(output), _unfinished(output)
    except PapermillExecutionError as error:
        cell, why = error.exec_count, f"{error.ename}: {error.evalue}"
    except DeadKernelError:
        cell = _last_cell(output)
        why = "its kernel died, often for want of memory: choose a smaller model, batch or length"
        why += "; the marks `completed` are not to be believed"
    except CellTimeoutError:
        cell, why = _last_cell(output), f"not done after {timeout_s} s. Allow more, or take fewer steps"
    if why:
        raise NotebookError(f"{path.name}, cell {cell}: {why} (see {output})")
    return output


@contextmanager
def _around_kernel(device: Any) -> Iterator[None]:
    """The environment of a kernel that begins here, with an emulated GPU if that is the device, and its end.

    A kernel that is ended, or that dies, cannot clear away what it left in its temporary folder. SIGTERM raises here,
    as Ctrl-C does: the kernel is ended and the folder removed.
    """
    card, handler = emulated_card(device or ""), signal.getsignal(signal.SIGTERM)
    try:
        with patch.dict(os.environ), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            with suppress(ValueError):  # only the main thread may
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            tempfile.tempdir = folder  # where Jupyter writes the ports and the key of the kernel
            os.environ.update(TMPDIR=folder, JUPYTER_RUNTIME_DIR=folder, **(environment(card) if card else {}))
            yield
    finally:
        tempfile.tempdir = None  # asked for anew
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Makes the folder of the file. If the disk refuses, it is told in words, and what is there of the file removed."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno is None:  # the time-out of a cell is one too
            raise
        with suppress(OSError):
            file.unlink()
        why = f"{error.filename or file.parent} cannot be written ({error.strerror})"
        raise NotebookError(f"notebooks: {why}. Free some space there, or make it writable.") from None


def _cells(executed: Path) -> list[Any]:
    """The cells with code in them."""
    cells = nbformat.read(str(executed), as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def _last_cell(executed: Path) -> int:
    """The number of the last cell that was begun; of one whose kernel died there is no execution count."""
    begun = enumerate((cell.metadata.get("papermill", {}).get("start_time") for cell in _cells(executed)), 1)
    return max([number for number, start in begun if start], default=0)


def _unfinished(executed: Path) -> str:
    """papermill takes `sys.exit(0)` in a cell for success, and leaves the cells after it alone."""
    waiting = sum(cell.execution_count is None for cell in _cells(executed))
    stopped = any(o.get("ename") == "SystemExit" for cell in _cells(executed) for o in cell.outputs)
    told = f"stopped by sys.exit or the like; {waiting} cells after it did not run. Take it out"
    return told if waiting or stopped else ""


def build(
    names: Iterable[str] = (),
    given: Mapping[str, Any] | None = None,
    force: bool = False,
    folder: Path = BUILD,
    timeout_s: int | None = None,
) -> list[Path]:
    """Execute notebooks into `<folder>/notebooks`. Those up to date are left alone.

    With parameters of one's own (`given`) they go to `<folder>/notebooks-own` and are always executed.

    Raises:
        ConfigurationError: unknown notebook or parameter, a value of the wrong type, a secret.
        NotebookError: a notebook failed; those before it are there.
    """
    paths, given = find_notebooks(names), parameters.plain(given or {})
    _refuse_here(given.get(DEVICE_PARAMETER), timeout_s)
    parameters.check_parameters(paths, {name: value for name, value in given.items() if name != DEVICE_PARAMETER})
    executed = {path: folder / ("notebooks-own" if given else "notebooks") / path.name for path in paths}
    for path in tqdm(paths, desc="notebooks", unit="notebook"):
        if force or given or not _up_to_date(executed[path], path):
            start = time.monotonic()
            execute_notebook(path, executed[path], given, timeout_s=timeout_s)
            tqdm.write(f"{path.stem}: {time.monotonic() - start:.0f} s")
    return list(executed.values())


def _refuse_here(device: Any, timeout_s: float | None) -> None:
    """Raises ConfigurationError for several ranks, a time that is none, and a device that cannot be chosen,
    UnavailableError for one that is not set up."""
    refuse_several_ranks()
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigurationError(f"notebooks: timeout {timeout_s} is no time. Give more than 0 seconds, or none.")
    if device is not None and (not isinstance(device, str) or emulated_card(device) is None):
        raise ConfigurationError(
            f"notebooks: device {device!r} cannot be chosen; a notebook takes the fastest that is there. Only a GPU in "
            f"software can, as in -p device {DEVICE}t4."
        )
    if device is not None:
        stub_folder()


def _up_to_date(executed: Path, notebook: Path) -> bool:
    """Executed to its end, and newer than the notebook, the package, the pins, and the embedded models and texts?"""
    if not _succeeded(executed):
        return False
    sources = [
        notebook,
        *PACKAGE.rglob("*.py"),
        *PACKAGE.rglob("*.toml"),
        *([] if INSTALLED else [ROOT / "requirements.txt"]),
    ]
    sources += [path for part in ("models", "corpora") for path in (DATA / part).rglob("*") if path.is_file()]
    return all(executed.stat().st_mtime > source.stat().st_mtime for source in sources)


def _succeeded(executed: Path) -> bool:
    """papermill writes after every cell: what a kill or an error left is there, and not to be taken for the whole."""
    with suppress(OSError, ValueError):  # not there, or cut short
        told = nbformat.read(str(executed), as_version=4).metadata.get("papermill", {})
        return not (told.get("exception") or _unfinished(executed))
    return False
