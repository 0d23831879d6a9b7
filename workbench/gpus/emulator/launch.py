"""Starting a program under the emulator, and reading what its processes report."""

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from workbench.base.errors import ConfigurationError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.emulator import card, host, place
from workbench.gpus.emulator.interpreter import (
    MEANT,
    PYTHON,
    Python,
    ask_python,
    python_meant,
    python_of,
    this_python,
)
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.gpus.emulator.report import TIMED_OUT, Emulation

INSIDE = Path(__file__).with_name("inside")
SECONDS_TO_END = 20.0
SECONDS_BETWEEN_LOOKS = 0.25


def environment(
    gpu: Gpu,
    count: int = 1,
    *,
    padding: bool = False,
    python: Python | None = None,
) -> dict[str, str]:
    """The environment of a child that shall see this card, so many of them, and no real one.

    Args:
        padding: the child is told that its batches hold padding, when it asks the device whether all is unmasked.
        python: the child's, by default that of this process.

    Raises:
        UnavailableError: the emulator is not set up, or cannot be on this machine; or the PyTorch there has no kernels
            for this card.
    """
    python = python or this_python()
    stubs = place.stub_folder(python)
    place.refuse_without_kernels(gpu, python)
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # it would choose among this machine's cards
    before = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    return variables | {
        "PYTHONPATH": os.pathsep.join([str(INSIDE), *place.python_path(python), *before]),
        "EMULATED_TORCH": str(place.torch_folder(python)),
        "EMULATED_PREFIX": python.prefix,
        card.VARIABLE: card.variable(gpu, count),
        "EMULATED_CARD": gpu.name,
        "EMULATED_STUBS": str(stubs),
        "TRITON_LIBCUDA_PATH": str(stubs),  # Triton compiles its launcher against the driver
        PADDING: "1" if padding else "",
    }


def emulate(
    command: Sequence[str],
    gpu: Gpu,
    *,
    python: str | None = None,
    ranks: int = 1,
    gpus: int = 1,
    padding: bool = False,
    masks: float = 1.0,
    timeout_s: float | None = None,
    history: bool = True,
    snapshot: Path | None = None,
    output: IO[str] | None = None,
) -> Emulation:
    """Run a program on emulated cards and collect what each of its processes needed.

    Args:
        command: as typed in a shell. The card is made for the PyTorch of the Python that it names; `python` alone is
            that of an activated environment, else that of this process.
        python: the Python for whose PyTorch the card is made, where the command does not show it.
        ranks: so many cards. Of a Python program so many processes too, started by torchrun.
        gpus: so many cards for each process, where it uses more than one.
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
    interpreter = ask_python(os.path.abspath(python)) if python else python_of(command)
    if not 0 <= masks <= 1:
        raise ConfigurationError(f"emulate: masks must be a share from 0 (none) to 1 (all), got {masks}.")
    remembered = ""
    if history:
        remembered = "snapshot" if snapshot else "1"
    cards = max(ranks, gpus)
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(gpu, cards, padding=padding, python=interpreter) | {
            card.VARIABLE: card.variable(gpu, cards, card.name_on_a_card(gpu)),
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
        stuck_at, host_was_full, status = _wait(process, Path(folder), timeout_s)
        reports = sorted(Path(folder).glob("[0-9]*.json"))
        using_a_gpu = []
        for path in reports:
            report = json.loads(path.read_text())
            if report["devices"]:
                using_a_gpu.append(report)
        snapshots = _keep(reports, snapshot) if snapshot else ()
        silent = max(len(list(Path(folder).glob("using-*"))) - len(reports), 0)
    using_a_gpu.sort(key=lambda report: (report["rank"], report["process"]))
    return Emulation(
        gpu,
        tuple(command),
        status,
        tuple(using_a_gpu),
        stuck_at,
        silent,
        snapshots,
        host_was_full,
        place.without_kernels(interpreter),
    )


def started_by(command: Sequence[str], ranks: int) -> list[str]:
    """The command with the path of the Python that `python` means, and with torchrun in front for several ranks."""
    if not command:
        raise ConfigurationError("emulate: name a program after --, as in: emulate --gpu t4 -- python train.py")
    if ranks < 1:
        raise ConfigurationError(f"emulate: ranks must be at least 1, got {ranks}.")
    if not PYTHON.fullmatch(Path(command[0]).name):
        return [*command]
    python = python_meant().executable if command[0] in MEANT else command[0]
    if ranks == 1:
        return [python, *command[1:]]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command[1:]]


def _wait(process: "subprocess.Popen[bytes]", reports: Path, timeout_s: float | None) -> tuple[str, str, int]:
    """Where the program was when its time was over, why this machine's memory had no room for it, and its exit status;
    an interruption is the program's too."""
    ends_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    stuck_at = ""
    host_was_full = ""
    status = TIMED_OUT
    try:
        while not host_was_full and time.monotonic() < ends_at:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(ends_at - time.monotonic(), SECONDS_BETWEEN_LOOKS))
                # as a shell says it: 128 and the number of the signal
                return "", "", 128 - code if code < 0 else code
            host_was_full = host.too_full(_pythons(reports))
        if host_was_full:
            host.end_processes(_pythons(reports))
            status = 128 + signal.SIGKILL
        else:
            stuck_at = _where(reports)
    except KeyboardInterrupt:
        status = 130
    _end(process)
    return stuck_at, host_was_full, status


def _pythons(reports: Path) -> list[int]:
    """The program's Python processes that are alive: a number of one that has ended may be another's by now."""
    processes = []
    for path in reports.glob("where-*"):
        number = path.name.partition("-")[2]
        with suppress(OSError):
            if str(reports).encode() in Path(f"/proc/{number}/environ").read_bytes():
                processes.append(int(number))
    return processes


def _where(reports: Path) -> str:
    """The stack of the program's main thread, innermost line first."""
    host.send(signal.SIGUSR1, _pythons(reports))
    time.sleep(0.5)
    stacks = [path.read_text().strip() for path in reports.glob("where-*")]
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
