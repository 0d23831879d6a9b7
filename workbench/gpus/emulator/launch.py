"""The start of a program under the emulator, and the reports that its processes leave.

What a process has to know stands in its environment. `environment` sets these variables for every process:

    EMULATED_GPU      the emulated GPU in numbers (`card.variable`); the stubs read it at each question
    EMULATED_CARD     its name in the catalogue, for the workbench (`current_emulated_gpu`)
    EMULATED_STUBS    the folder of the built stubs, which `inside/sitecustomize.py` loads
    EMULATED_TORCH    the folder of the PyTorch for which they were built; another one is refused
    EMULATED_PREFIX   the prefix of the Python for which they were built
    EMULATED_PADDING  "1": batches hold padding (`padding.py`)

`emulate` adds these for a program:

    EMULATED_REPORTS  the folder where each process leaves its report
    EMULATED_HISTORY  "1": note who allocates; "snapshot": write PyTorch's snapshot, too
    EMULATED_FROM     the folder where the program was started; the report leaves it out of file names
    EMULATED_MASKS    the share of ones in masks that decide a size

EMULATED_TRUNK marks the process that others are forked from (`call.py`), which must not ask the driver. With
EMULATED_CALLS the stubs print every call, to find out which one a program misses.
"""

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
    BARE_NAMES,
    PYTHON,
    Python,
    ask_python,
    find_default_python,
    find_python_of,
    this_python,
)
from workbench.gpus.emulator.padding import VARIABLE as PADDING
from workbench.gpus.emulator.report import TIMED_OUT, Emulation

INSIDE = Path(__file__).with_name("inside")
SECONDS_TO_END = 20.0  # time between a signal to a program and the next, stronger one
SECONDS_BETWEEN_LOOKS = 0.25  # time between two looks at the host's memory


def environment(
    gpu: Gpu,
    count: int = 1,
    *,
    padding: bool = False,
    python: Python | None = None,
) -> dict[str, str]:
    """Return the environment variables of a child that shall see cards of this kind, and no real one.

    Args:
        count: the number of cards.
        padding: what the card answers if the child asks whether its batches hold padding.
        python: the child's interpreter, by default that of this process.

    Raises:
        UnavailableError: the emulator is not set up, or cannot run on this machine; or the interpreter's PyTorch has no
            kernels for this card.
    """
    python = python or this_python()
    stubs = place.stub_folder(python)
    place.refuse_without_kernels(gpu, python)
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)  # it was meant for this machine's own cards
    own_path = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    return variables | {
        "PYTHONPATH": os.pathsep.join([str(INSIDE), *place.python_path(python), *own_path]),
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
    """Run a program on emulated GPUs and collect what each of its processes needed.

    Args:
        command: as typed in a shell. The stubs are built for the PyTorch of the Python that it names; `python` alone is
            that of an activated environment, else that of this process.
        python: the Python for whose PyTorch the stubs are built, if the command does not show it.
        ranks: the number of cards. For a Python program also the number of processes, which torchrun starts.
        gpus: the number of cards of each process, if it uses more than one.
        masks: the share of ones, from 0 to 1, in a mask whose ones decide a size, as in `x[mask]`. 1 is an upper bound.
        timeout_s: end the program after so many seconds, and say where it was; None for no limit.
        history: let PyTorch remember which lines allocate.
        snapshot: a path for PyTorch's memory snapshot; with several processes, the rank goes into the name.
        output: where the program's standard output goes, by default to that of this process.

    Raises:
        ConfigurationError: there is no such program, `ranks` is below 1, or `masks` not between 0 and 1.
        UnavailableError: the emulator is not set up, or cannot run on this machine.
    """
    command = complete_command(command, ranks)
    interpreter = ask_python(os.path.abspath(python)) if python else find_python_of(command)
    if not 0 <= masks <= 1:
        raise ConfigurationError(f"emulate: masks must be a share from 0 (none) to 1 (all), got {masks}.")
    history_mode = ""
    if history:
        history_mode = "snapshot" if snapshot else "1"
    cards = max(ranks, gpus)
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(gpu, cards, padding=padding, python=interpreter) | {
            card.VARIABLE: card.variable(gpu, cards, card.name_on_a_card(gpu)),
            "EMULATED_REPORTS": folder,
            "EMULATED_HISTORY": history_mode,
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
        snapshots = _move_snapshots(reports, snapshot) if snapshot else ()
        without_report = max(len(list(Path(folder).glob("using-*"))) - len(reports), 0)
    using_a_gpu.sort(key=lambda report: (report["rank"], report["process"]))
    return Emulation(
        gpu,
        tuple(command),
        status,
        tuple(using_a_gpu),
        stuck_at,
        without_report,
        snapshots,
        host_was_full,
        place.without_kernels(interpreter),
    )


def complete_command(command: Sequence[str], ranks: int) -> list[str]:
    """Return the command with the path of the Python that `python` means, and with torchrun for several ranks."""
    if not command:
        raise ConfigurationError("emulate: name a program after --, as in: emulate --gpu t4 -- python train.py")
    if ranks < 1:
        raise ConfigurationError(f"emulate: ranks must be at least 1, got {ranks}.")
    if not PYTHON.fullmatch(Path(command[0]).name):
        return [*command]
    python = find_default_python().executable if command[0] in BARE_NAMES else command[0]
    if ranks == 1:
        return [python, *command[1:]]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command[1:]]


def _wait(process: "subprocess.Popen[bytes]", reports: Path, timeout_s: float | None) -> tuple[str, str, int]:
    """Wait for a program, and end it if its time is over, if the host's memory is full, or at an interrupt of this
    process.

    Returns:
        Where the program was when its time was over; why the host's memory had no room for it; and its exit status. A
        text is empty if its case did not occur.
    """
    ends_at = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
    stuck_at = ""
    host_was_full = ""
    status = TIMED_OUT
    try:
        while not host_was_full and time.monotonic() < ends_at:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(ends_at - time.monotonic(), SECONDS_BETWEEN_LOOKS))
                # A shell adds 128 to the number of the signal that ended a program.
                return "", "", 128 - code if code < 0 else code
            host_was_full = host.why_too_full(_find_processes(reports))
        if host_was_full:
            host.end_processes(_find_processes(reports))
            status = 128 + signal.SIGKILL
        else:
            stuck_at = _find_stack(reports)
    except KeyboardInterrupt:
        status = 130
    _end_program(process)
    return stuck_at, host_was_full, status


def _find_processes(reports: Path) -> list[int]:
    """Return the numbers of the program's Python processes that are alive."""
    processes = []
    for path in reports.glob("where-*"):
        number = path.name.partition("-")[2]
        # The number of a process that has ended may be another program's by now: its environment tells.
        with suppress(OSError):
            if str(reports).encode() in Path(f"/proc/{number}/environ").read_bytes():
                processes.append(int(number))
    return processes


def _find_stack(reports: Path) -> str:
    """Return the stack of the program's main thread, the innermost line first; empty if no process answers."""
    host.send(signal.SIGUSR1, _find_processes(reports))
    time.sleep(0.5)
    stacks = [path.read_text().strip() for path in reports.glob("where-*")]
    return next(filter(None, stacks), "")


def _end_program(process: "subprocess.Popen[bytes]") -> None:
    """End a program as Ctrl-C does, so that it reports; then by force."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
            return


def _move_snapshots(reports: Sequence[Path], snapshot: Path) -> tuple[Path, ...]:
    """Move the snapshots to the path that the caller named, and return their paths."""
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    pickles = [path.with_suffix(".pickle") for path in reports if path.with_suffix(".pickle").exists()]
    moved = []
    for pickle in pickles:
        target = snapshot
        if len(pickles) > 1:
            target = snapshot.with_stem(f"{snapshot.stem}-{pickle.stem}")
        moved.append(Path(shutil.move(pickle, target)))
    return tuple(moved)
