"""Starting a program under the emulator, and reading what its processes report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import card, place
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.gpus.emulator.report import TIMED_OUT, Emulation

INSIDE = Path(__file__).with_name("inside")
SECONDS_TO_END = 20.0
PYTHON = ("python", "python3")


def environment(gpu: Gpu, count: int = 1, *, padding: bool = False) -> dict[str, str]:
    """The environment of a child that shall see this card, so many of them, and no real one.

    Args:
        padding: the child is told that its batches hold padding, when it asks the device whether all is unmasked.

    Raises:
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    stubs = place.stub_folder()
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # it would choose among this machine's cards
    before = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    return variables | {
        "PYTHONPATH": os.pathsep.join([str(INSIDE), *place.python_path(), *before]),
        card.VARIABLE: card.variable(gpu, count),
        "EMULATED_CARD": gpu.name,
        "EMULATED_STUBS": str(stubs),
        "TRITON_LIBCUDA_PATH": str(stubs),  # Triton compiles its launcher against the driver
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # calls `watch` of `inside`
        PADDING: "1" if padding else "",
    }


def emulate(
    command: Sequence[str],
    gpu: Gpu,
    *,
    ranks: int = 1,
    padding: bool = False,
    masks: float = 1.0,
    timeout_s: float | None = None,
    history: bool = True,
    snapshot: Path | None = None,
    output: IO[str] | None = None,
) -> Emulation:
    """Run a program on emulated cards and collect what each of its processes needed.

    Args:
        command: as typed in a shell; `python` is the Python of this process.
        ranks: so many cards. Of a Python program so many processes too, started by torchrun.
        masks: of a mask whose ones decide a size, as in `x[mask]`, so many are taken to be ones, from 0 to 1. All of
            them is an upper bound.
        timeout_s: end the program after so many seconds, and say where it was.
        history: let PyTorch remember which lines allocate.
        snapshot: write the standard memory snapshot there; with several processes, the rank goes into the name.
        output: where the program's standard output goes, by default to that of this process.

    Raises:
        ConfigurationError: no such program, `ranks` below 1, or `masks` not between 0 and 1.
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    command = started_by(command, ranks)
    if not 0 <= masks <= 1:
        raise ConfigurationError(f"emulate: masks must be a share from 0 (none) to 1 (all), got {masks}.")
    remembered = ""
    if history:
        remembered = "snapshot" if snapshot else "1"
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(gpu, ranks, padding=padding) | {
            "EMULATED_REPORTS": folder,
            "EMULATED_HISTORY": remembered,
            "EMULATED_FROM": f"{Path.cwd()}{os.sep}",
            "EMULATED_MASKS": str(masks),
        }
        try:
            process = subprocess.Popen(command, env=variables, stdout=output)
        except OSError as error:
            cure = " A Python program needs python in front of it." if command[0].endswith(".py") else ""
            raise ConfigurationError(f"emulate: {command[0]!r} cannot be started: {error.strerror}.{cure}") from None
        stuck_at, status = _wait(process, Path(folder), timeout_s)
        reports = sorted(Path(folder).glob("[0-9]*.json"))
        processes = [json.loads(path.read_text()) for path in reports]
        snapshots = _keep(reports, snapshot) if snapshot else ()
        silent = max(len(list(Path(folder).glob("using-*"))) - len(reports), 0)
    using_a_gpu = [process for process in processes if process["devices"]]
    using_a_gpu.sort(key=lambda process: (process["rank"], process["process"]))
    return Emulation(gpu, tuple(command), status, tuple(using_a_gpu), stuck_at, silent, snapshots)


def started_by(command: Sequence[str], ranks: int) -> list[str]:
    """The command with this process' Python, and with torchrun in front for several ranks."""
    if not command:
        raise ConfigurationError("emulate: name a program after --, as in: emulate --gpu t4 -- python train.py")
    if ranks < 1:
        raise ConfigurationError(f"emulate: ranks must be at least 1, got {ranks}.")
    if Path(command[0]).name not in PYTHON:
        return [*command]
    python = sys.executable if command[0] in PYTHON else command[0]
    if ranks == 1:
        return [python, *command[1:]]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command[1:]]


def _wait(process: "subprocess.Popen[bytes]", reports: Path, timeout_s: float | None) -> tuple[str, int]:
    """Where the program was when its time was over, and its exit status; an interruption is the program's too."""
    try:
        code = process.wait(timeout_s)
        return "", 128 - code if code < 0 else code  # as a shell says it: 128 and the number of the signal
    except subprocess.TimeoutExpired:
        ended = _where(reports), TIMED_OUT
    except KeyboardInterrupt:
        ended = "", 130
    _end(process)
    return ended


def _where(reports: Path) -> str:
    """The stack of the program's main thread, innermost line first."""
    files = list(reports.glob("where-*"))
    for path in files:
        with suppress(ProcessLookupError):
            os.kill(int(path.name.partition("-")[2]), signal.SIGUSR1)
    time.sleep(0.5)
    stacks = [path.read_text().strip() for path in files]
    return next(filter(None, stacks), "")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does, so that it reports; then by force."""
    for way in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(way)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


def _keep(reports: Sequence[Path], snapshot: Path) -> tuple[Path, ...]:
    """Move the snapshots to where they are asked for."""
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    pickles = [path.with_suffix(".pickle") for path in reports if path.with_suffix(".pickle").exists()]
    moved = []
    for pickle in pickles:
        target = snapshot if len(pickles) == 1 else snapshot.with_stem(f"{snapshot.stem}-{pickle.stem}")
        moved.append(Path(shutil.move(pickle, target)))
    return tuple(moved)
