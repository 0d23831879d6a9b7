"""The first module of every Python process under the emulator: it loads the stubs, and the process leaves a report.

Python imports a module of this name at its start (https://docs.python.org/3/library/site.html). It knows nothing of the
workbench, since the program's Python may be another. It has all that the emulator does to the program.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import pickle
import platform
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import _emulated_history as history  # type: ignore[import-not-found]  # beside this file, which Python's path names
import _emulated_host  # type: ignore[import-not-found]
import _emulated_imports  # type: ignore[import-not-found]
import _emulated_sizes  # type: ignore[import-not-found]
import _emulated_steps  # type: ignore[import-not-found]

HISTORY = 100_000  # allocations and frees that PyTorch's memory history keeps
PEAKS: dict[int, tuple[int, int]] = {}  # allocated and reserved bytes at most, by device, before its last reset
SECONDS_BETWEEN_LOOKS = 0.5  # time between two looks at the peaks
SHARE_OF_TIME = 0.05  # the share of time that reports may take while the program runs
ENDING = threading.Event()


def load_stubs() -> None:
    """Load the stubs by their paths, before PyTorch: a library that needs one of their names then gets the stub, in
    whatever folders it searches."""
    folder = Path(os.environ["EMULATED_STUBS"])
    # The other libraries are written on top of these.
    first = [folder / "libemulator.so", *folder.glob("libcudart.so.*[0-9]")]
    others = sorted(set(folder.glob("*.so*")) - set(first))
    for path in first + others:
        if path.suffix not in (".c", ".map"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def import_hidden_sitecustomize() -> None:
    """Import the program's own sitecustomize, which this one hides."""
    this_folder = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != this_folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def refuse_another_pytorch(spec: Any) -> None:
    """Refuse another PyTorch than the one for which the stubs were built: that one would hide it, or it would find
    libraries that are not its own."""
    folder = os.path.dirname(str(spec.origin))
    expected = os.environ["EMULATED_TORCH"]
    is_in_front = os.path.dirname(expected) in os.environ["PYTHONPATH"].split(os.pathsep)
    is_its_own = os.path.realpath(folder) == os.path.realpath(expected)
    if not is_its_own or (is_in_front and sys.prefix != os.environ["EMULATED_PREFIX"]):
        raise ImportError(
            f"emulated GPU: {sys.executable} is another Python than the one that the card was made "
            f"for (that in {os.environ['EMULATED_PREFIX']}). Name it: "
            f"emulate --python {sys.executable} -- PROGRAM"
        )


def watch(torch: Any) -> None:
    """Remember who allocates, from the first use of CUDA on; report at the end, and as the peak moves."""
    spare_ddp_values(torch)
    if os.environ.get("EMULATED_TRUNK"):
        torch.cuda.get_device_capability = read_capability
        import torch.utils._triton as triton

        # PyTorch asks the card whether it suits Triton, which a trunk must not do; every card of the catalogue does.
        triton.has_triton = triton.has_triton_package
    if not os.environ.get("EMULATED_REPORTS") or is_compile_worker():
        return
    torch.cuda._lazy_call(Path(os.environ["EMULATED_REPORTS"], f"using-{os.getpid()}").touch)
    if os.environ.get("EMULATED_HISTORY"):
        remember = torch.cuda.memory._record_memory_history
        torch.cuda._lazy_call(lambda: remember(max_entries=HISTORY, stacks="python"))
    torch.cuda._lazy_call(lambda: _emulated_sizes.decide_by_rule(torch, history.program_line))
    _emulated_host.draw_no_large_tensors(torch)
    note_peaks_before_resets(torch)
    _emulated_steps.note_steps(torch)
    reporter = threading.Thread(target=report_as_the_peak_moves, args=(torch,), daemon=True)
    import_no_compiler_for(torch, reporter)
    torch.cuda._lazy_call(reporter.start)
    atexit.register(report_at_the_end, reporter)


def is_compile_worker() -> bool:
    """Whether this is a worker of `torch.compile`, which asks for the card, takes nothing of it, and outlives the
    program."""
    arguments = getattr(sys, "orig_argv", sys.argv)  # Python 3.9 has no orig_argv
    return any("compile_worker" in argument for argument in arguments)


def spare_ddp_values(torch: Any) -> None:
    """Keep DistributedDataParallel from reading values off the card: it sends the shapes of the parameters, and the
    order in which gradients came, to all ranks by tensors there. It keeps the order that it has."""
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    torch.distributed.Reducer._rebuild_buckets = lambda _: False


def read_capability(device: Any = None) -> tuple[int, int]:
    """Return the compute capability without a look at the card, after which a trunk could be forked no more. PyTorch
    would look; bitsandbytes and torchao ask when they are imported."""
    fields = dict(field.partition("=")[::2] for field in os.environ["EMULATED_GPU"].split(" "))
    return int(fields["major"]), int(fields["minor"])


def note_peaks_before_resets(torch: Any) -> None:
    """Remember PyTorch's peaks whenever the program resets them."""
    reset = torch._C._cuda_resetPeakMemoryStats

    def note_and_reset(index: int) -> None:
        PEAKS[index] = peaks(torch, index)
        reset(index)

    torch._C._cuda_resetPeakMemoryStats = note_and_reset


def peaks(torch: Any, index: int) -> tuple[int, int]:
    """Return the most bytes that a device allocated and reserved, whether the program has reset PyTorch's peaks or
    not."""
    statistics = torch.cuda.memory_stats(index)
    allocated, reserved = PEAKS.get(index, (0, 0))
    allocated = max(allocated, statistics.get("allocated_bytes.all.peak", 0))
    reserved = max(reserved, statistics.get("reserved_bytes.all.peak", 0))
    return allocated, reserved


def import_no_compiler_for(torch: Any, reporter: threading.Thread) -> None:
    """Keep the reporter's thread from importing PyTorch's compiler, for which it asks to name the lines of a history:
    if the program's own thread imports it meanwhile, one of them sees half of it."""
    import_lazily = torch.__getattr__

    def import_for_others(name: str) -> Any:
        if name == "_inductor" and threading.current_thread() is reporter:
            raise AttributeError(name)
        return import_lazily(name)

    torch.__getattr__ = import_for_others


def report_as_the_peak_moves(torch: Any) -> None:
    """Report whenever a peak has moved, so that a process has reported before it is killed, as papermill may do with a
    kernel and torchrun with other ranks."""
    began = time.time()
    reported: list[tuple[int, int]] = []
    pause = SECONDS_BETWEEN_LOOKS
    while not ENDING.wait(pause):
        if torch.cuda.is_initialized():
            peaks_now = [peaks(torch, index) for index in range(torch.cuda.device_count())]
            if peaks_now != reported:
                before = time.monotonic()
                report(torch, began, is_running=True)
                reported = peaks_now
                pause = max(SECONDS_BETWEEN_LOOKS, (time.monotonic() - before) / SHARE_OF_TIME)
    report(torch, began)


def report_at_the_end(reporter: threading.Thread) -> None:
    """Wait for the last report. The thread that has reported so far writes it, so that no earlier report comes after
    it."""
    ENDING.set()
    if reporter.ident is not None:
        reporter.join()


def report(torch: Any, began: float, *, is_running: bool = False) -> None:
    """Write a report as a JSON file, and a snapshot beside it if one was asked for."""
    folder = Path(os.environ["EMULATED_REPORTS"])
    if not folder.is_dir():  # the program has ended, and this process of it has not yet
        return
    name = f"{os.environ.get('RANK', '0')}-{os.getpid()}"
    devices = [device_report(torch, index) for index in range(torch.cuda.device_count())]
    used = [device for device in devices if device["peak_reserved_bytes"] or device["refusals"]]
    facts = {
        "process": os.getpid(),
        "rank": int(os.environ.get("RANK", "0")),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "executable": sys.executable,
        "began": began,
        "ended": time.time(),
        "was_killed": is_running,  # a report at the end replaces this one, unless the process is killed
        "devices": used,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "argv": sys.argv,
        "not_measured": not_measured(),
        "sizes_by_values": list(_emulated_sizes.NOTES.values()),
    }
    if os.environ.get("EMULATED_HISTORY") and used:
        snapshot = torch.cuda.memory._snapshot()
        for device in used:
            index = device["index"]
            trace = snapshot["device_traces"][index]
            device.update(history.report_peak(trace, history.find_blocks_in_use(snapshot, index)))
            device["reserved_after_refusals_bytes"] = history.most_reserved_after_refusals(trace, snapshot, index)
            device["growth"] = history.report_growth(trace, _emulated_steps.marks())
            device["holders"] = list(_emulated_steps.HOLDERS)
        if os.environ["EMULATED_HISTORY"] == "snapshot":
            with (folder / f"{name}.pickle").open("wb") as file:
                pickle.dump(snapshot, file)
    part = folder / f".{name}.json"
    part.write_text(json.dumps(facts))
    part.rename(folder / f"{name}.json")


def not_measured() -> list[str]:
    """Return the names of things that take memory of a real card in amounts that nobody knows."""
    emulator = ctypes.CDLL(str(Path(os.environ["EMULATED_STUBS"], "libemulator.so")))
    emulator.what_was_not_measured.restype = ctypes.c_char_p
    names: bytes = emulator.what_was_not_measured()
    return names.decode().splitlines()


def device_report(torch: Any, index: int) -> dict[str, Any]:
    """Return the part of a report that is about one device."""
    allocated, reserved = peaks(torch, index)
    return {
        "index": index,
        "card": card_of(index),
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "refusals": torch.cuda.memory_stats(index).get("num_ooms", 0),
        "cap_bytes": cap_of(torch, index),
    }


def cap_of(torch: Any, index: int) -> int | None:
    """Return the bytes of the card that the program allows itself (`set_per_process_memory_fraction`); None for all of
    it, or if PyTorch is too old to tell."""
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    fraction = fraction_of(index) if fraction_of else 1.0
    if fraction >= 1:
        return None
    return int(fraction * torch.cuda.get_device_properties(index).total_memory)


def card_of(index: int) -> int:
    """Return the number of the card that the process calls by this index: CUDA_VISIBLE_DEVICES may have chosen some."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if index < len(visible) and visible[index].strip().isdigit():
        return int(visible[index])
    return index


def explain_zeros() -> None:
    """Explain the end of a program that divides by a value of the card, or asserts something of it: the emulator is the
    reason."""
    show = sys.excepthook

    def show_and_explain(error_type: Any, error: Any, traceback: Any) -> None:
        show(error_type, error, traceback)
        is_of_a_value = error_type in (ZeroDivisionError, AssertionError) or "math domain error" in str(error)
        if is_of_a_value and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            print(
                "emulated GPU: values of the card are not computed, and each reads 0, "
                "a loss too. If this divides by one, takes its logarithm or asserts something of "
                "it, it says nothing about memory. max(value, 1e-9) runs here and on a card; "
                "python -O leaves assertions out.",
                file=sys.stderr,
            )

    sys.excepthook = show_and_explain


def answer_signals() -> None:
    """Let a signal from outside write down where the program is, which may wait for a value that never comes.

    An interrupt ends the program with a report, also in a shell's job in the background, which inherits that interrupts
    are ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stack = open(Path(os.environ["EMULATED_REPORTS"], f"where-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


if os.environ.get("EMULATED_STUBS"):
    load_stubs()
    end_of_text = _emulated_sizes.generate_to_the_greatest_length
    watched = {"torch": watch, "transformers.generation.utils": end_of_text}
    sys.meta_path.insert(0, _emulated_imports.WatchImports(watched, {"torch": refuse_another_pytorch}))
    if os.environ.get("EMULATED_REPORTS"):
        answer_signals()
        explain_zeros()
import_hidden_sitecustomize()
