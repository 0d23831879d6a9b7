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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import card, place
from workbench.gpus.emulator.padding import VARIABLE as PADDING

INSIDE = Path(__file__).with_name("inside")
TIMED_OUT = 124  # the exit status that timeout(1) has
SECONDS_TO_END = 20.0
PYTHON = ("python", "python3")


@dataclass(frozen=True)
class Emulation:
    """What became of a program. `processes` are the reports of those that used a GPU, by rank; bytes are integers."""

    gpu: Gpu
    command: tuple[str, ...]
    exit_status: int
    processes: tuple[dict[str, Any], ...]
    stuck_at: str = ""  # where it was when its time was over
    silent: int = 0  # processes that ended without a report, being killed
    snapshots: tuple[Path, ...] = ()

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The reports of all devices, that which reserved most first."""
        devices = [device for process in self.processes for device in process["devices"]]
        return sorted(devices, key=lambda device: -device["peak_reserved_bytes"])

    @property
    def peak_reserved_bytes(self) -> int:
        return max((device["peak_reserved_bytes"] for device in self.devices), default=0)


def environment(gpu: Gpu, count: int = 1, *, padding: bool = False) -> dict[str, str]:
    """The environment of a child that shall see this card, so many of them, and no real one.

    Args:
        padding: the child is told that its batches hold padding, when it asks the device whether all is unmasked.

    Raises:
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    stubs = place.stub_folder()
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = os.pathsep.join([str(INSIDE), *place.python_path(), *before])
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    told = {
        card.VARIABLE: card.variable(gpu, count),
        "EMULATED_CARD": gpu.name,
        "EMULATED_STUBS": str(stubs),
        "TRITON_LIBCUDA_PATH": str(stubs),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",  # calls `watch` of `inside`
        PADDING: "1" if padding else "",
    }
    return {**kept, "PYTHONPATH": path, **told}


def emulate(
    command: Sequence[str],
    gpu: Gpu,
    *,
    ranks: int = 1,
    padding: bool = False,
    timeout_s: float | None = None,
    history: bool = True,
    snapshot: Path | None = None,
    output: IO[str] | None = None,
) -> Emulation:
    """Run a program on emulated cards and collect what each of its processes needed.

    Args:
        command: as typed in a shell; `python` is the Python of this process.
        ranks: so many cards. Of a Python program so many processes too, started by torchrun.
        timeout_s: end the program after so many seconds, and say where it was.
        history: let PyTorch remember which lines allocate.
        snapshot: write the standard memory snapshot there; with several processes, the rank goes into the name.
        output: where the program's standard output goes, by default to that of this process.

    Raises:
        ConfigurationError: no such program, or `ranks` below 1.
        UnavailableError: the emulator is not set up, or cannot be on this machine.
    """
    command = started_by(command, ranks)
    with tempfile.TemporaryDirectory() as reports:
        told = {"EMULATED_REPORTS": reports, "EMULATED_HISTORY": ("snapshot" if snapshot else "1") if history else ""}
        told["EMULATED_FROM"] = f"{Path.cwd()}{os.sep}"
        try:
            process = subprocess.Popen(command, env=environment(gpu, ranks, padding=padding) | told, stdout=output)
        except OSError as error:
            cure = " A Python program needs python in front of it." if command[0].endswith(".py") else ""
            raise ConfigurationError(f"emulate: {command[0]!r} cannot be started: {error.strerror}.{cure}") from None
        stuck_at, status = _wait(process, Path(reports), timeout_s)
        found = sorted(Path(reports).glob("[0-9]*.json"))
        processes = [json.loads(path.read_text()) for path in found]
        kept = _keep(found, snapshot) if snapshot else ()
        silent = len(list(Path(reports).glob("using-*"))) - len(found)
    processes = sorted((p for p in processes if p["devices"]), key=lambda p: (p["rank"], p["process"]))
    return Emulation(gpu, tuple(command), status, tuple(processes), stuck_at, max(silent, 0), kept)


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
    return next((text for path in files if (text := path.read_text().strip())), "")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl-C does, so that it reports; then by force."""
    for way in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(way)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


def _keep(found: Sequence[Path], snapshot: Path) -> tuple[Path, ...]:
    """Move the snapshots to where they are asked for."""
    there = [pickle for path in found if (pickle := path.with_suffix(".pickle")).exists()]
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    if len(there) == 1:
        return (Path(shutil.move(there[0], snapshot)),)
    return tuple(Path(shutil.move(p, snapshot.with_stem(f"{snapshot.stem}-{p.stem}"))) for p in there)
