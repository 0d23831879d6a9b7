"""Runs first in every Python process under the emulator: loads the stubs, and leaves a report when the process ends.

Python imports a module of this name at its start (https://docs.python.org/3/library/site.html). It knows nothing of the
workbench: the program's Python may be another. Everything that it does to the program is here.
"""

import atexit
import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import pickle
import resource
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import _emulated_sizes  # type: ignore[import-not-found]  # beside this file, which Python's path names

HISTORY = 100_000  # allocations and frees that PyTorch's memory history keeps
CHANGE = {"free_completed": 1, "alloc": -1}  # of the bytes in use, going back
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}  # of the bytes reserved
LINES = 10
PEAKS: dict[int, tuple[int, int]] = {}  # of each device, before its last reset


def load_stubs() -> None:
    """By their paths, before PyTorch: a library that needs one of their names then gets them, wherever it looks."""
    folder = Path(os.environ["EMULATED_STUBS"])
    first = [folder / "libemulator.so", *folder.glob("libcudart.so.*[0-9]")]  # the others are written on top of these
    others = sorted(set(folder.glob("*.so*")) - set(first))
    for path in first + others:
        if path.suffix not in (".c", ".map"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def import_the_next() -> None:
    """The program's own sitecustomize, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def watch() -> None:
    """PyTorch calls it when it has been imported: the entry point `torch.backends` beside this file says so.

    Remember who allocates, from the first use of CUDA on; report at the end.
    """
    import torch

    spare_ddp_values(torch)
    if os.environ.get("EMULATED_TRUNK"):
        torch.cuda.get_device_capability = capability
        import torch.utils._triton as triton

        triton.has_triton = triton.has_triton_package  # it looks at the card too, and every one here suits Triton
    if not os.environ.get("EMULATED_REPORTS"):
        return
    torch.cuda._lazy_call(Path(os.environ["EMULATED_REPORTS"], f"using-{os.getpid()}").touch)
    if os.environ.get("EMULATED_HISTORY"):
        remember = torch.cuda.memory._record_memory_history
        torch.cuda._lazy_call(lambda: remember(max_entries=HISTORY, stacks="python"))
    torch.cuda._lazy_call(lambda: _emulated_sizes.decide_by_rule(torch, line_of))
    note_peaks_before_resets(torch)
    atexit.register(report, torch)


def spare_ddp_values(torch: Any) -> None:
    """DistributedDataParallel sends the parameters' shapes to all ranks, and the order in which gradients came, and
    reads them off the card again. It goes on with the order that it has."""
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_: None
    torch.distributed.Reducer._rebuild_buckets = lambda _: False


def capability(device: Any = None) -> tuple[int, int]:
    """As PyTorch would answer, but it would look at the card first, and can then be forked no more. bitsandbytes and
    torchao ask when they are imported."""
    fields = dict(field.partition("=")[::2] for field in os.environ["EMULATED_GPU"].split(" "))
    return int(fields["major"]), int(fields["minor"])


def note_peaks_before_resets(torch: Any) -> None:
    """The program may reset PyTorch's peaks, as often as it likes."""
    reset = torch._C._cuda_resetPeakMemoryStats

    def note_and_reset(index: int) -> None:
        PEAKS[index] = peaks(torch, index)
        reset(index)

    torch._C._cuda_resetPeakMemoryStats = note_and_reset


def peaks(torch: Any, index: int) -> tuple[int, int]:
    """The most that was allocated and reserved, resets or not."""
    statistics = torch.cuda.memory_stats(index)
    allocated, reserved = PEAKS.get(index, (0, 0))
    allocated = max(allocated, statistics.get("allocated_bytes.all.peak", 0))
    reserved = max(reserved, statistics.get("reserved_bytes.all.peak", 0))
    return allocated, reserved


def report(torch: Any) -> None:
    """One JSON file; a snapshot beside it if it was asked for."""
    if not torch.cuda.is_initialized():
        return
    folder = Path(os.environ["EMULATED_REPORTS"])
    name = f"{os.environ.get('RANK', '0')}-{os.getpid()}"
    devices = [used_of_device(torch, index) for index in range(torch.cuda.device_count())]
    used = [device for device in devices if device["peak_reserved_bytes"] or device["refusals"]]
    facts = {
        "process": os.getpid(),
        "rank": int(os.environ.get("RANK", "0")),
        "torch": torch.__version__,
        "devices": used,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "argv": sys.argv,
        "not_measured": not_measured(),
        "sizes_by_values": list(_emulated_sizes.NOTES.values()),
    }
    if os.environ.get("EMULATED_HISTORY") and used:
        snapshot = torch.cuda.memory._snapshot()
        for device in used:
            trace = snapshot["device_traces"][device["index"]]
            device |= at_the_peak(trace, living(snapshot, device["index"]))
            device["reserved_after_refusals_bytes"] = reserved_after_refusals(trace, snapshot, device["index"])
        if os.environ["EMULATED_HISTORY"] == "snapshot":
            with (folder / f"{name}.pickle").open("wb") as file:
                pickle.dump(snapshot, file)
    part = folder / f".{name}.json"
    part.write_text(json.dumps(facts))
    part.rename(folder / f"{name}.json")


def not_measured() -> list[str]:
    """By its name, what took memory of a real card in amounts that nobody knows."""
    emulator = ctypes.CDLL(str(Path(os.environ["EMULATED_STUBS"], "libemulator.so")))
    emulator.what_was_not_measured.restype = ctypes.c_char_p
    names: bytes = emulator.what_was_not_measured()
    return names.decode().splitlines()


def used_of_device(torch: Any, index: int) -> dict[str, Any]:
    allocated, reserved = peaks(torch, index)
    return {
        "index": index,
        "peak_allocated_bytes": allocated,
        "peak_reserved_bytes": reserved,
        "refusals": torch.cuda.memory_stats(index).get("num_ooms", 0),
        "cap_bytes": cap_of(torch, index),
    }


def cap_of(torch: Any, index: int) -> int | None:
    """What the program has allowed itself of the card (`set_per_process_memory_fraction`). None: all of it, or
    PyTorch is too old to tell."""
    fraction_of = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    fraction = fraction_of(index) if fraction_of else 1.0
    return int(fraction * torch.cuda.get_device_properties(index).total_memory) if fraction < 1 else None


def living(snapshot: Any, index: int) -> dict[int, int]:
    """The bytes of each block in use at the end, by address."""
    sizes = {}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if segment["device"] == index and block["state"] == "active_allocated":
                sizes[block["address"]] = block["requested_size"]
    return sizes


def at_the_peak(trace: Any, sizes: dict[int, int]) -> dict[str, Any]:
    """Back from the end, to find the instant of the peak that the history still holds; then who held it."""
    usage = [sum(sizes.values())]  # from the end of the history back to its beginning
    for event in reversed(trace):
        usage.append(usage[-1] + CHANGE.get(event["action"], 0) * event["size"])
    peak = max(usage)
    instant = len(trace) - usage.index(peak)  # of several, the last in time
    alive = dict(sizes)
    for event in reversed(trace[instant:]):
        if event["action"] == "alloc":
            alive.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            alive[event["addr"]] = event["size"]
    makers = {event["addr"]: event["frames"] for event in trace[:instant] if event["action"] == "alloc"}
    lines = Counter[str]()
    functions = Counter[str]()
    for address, size in alive.items():
        line = line_of(makers[address]) if address in makers else "before the history begins"
        lines[line] += size
        functions[f"{line}{function_of(makers.get(address))}"] += size
    most = [{"line": line, "bytes": size} for line, size in lines.most_common(LINES)]
    return {"lines": most, "functions": functions, "peak_in_history_bytes": peak}


def reserved_after_refusals(trace: Any, snapshot: Any, index: int) -> int | None:
    """The most that was reserved since the program, refused for the last time, asked the card for memory again.

    What it had held by then is what did not fit. None where nothing was refused, as far as the history goes back.
    """
    refused = [number for number, event in enumerate(trace) if event["action"] == "oom"]
    if not refused:
        return None
    changes = [SEGMENTS.get(event["action"], 0) * event["size"] for event in trace[refused[-1] :]]
    at_the_end = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == index)
    reserved = at_the_end - sum(changes)
    most = 0
    for change in changes:
        reserved += change
        if change > 0 or most:
            most = max(most, reserved)
    return most or at_the_end


def line_of(frames: Any) -> str:
    """The innermost line of the program itself; of a library's, where none is the program's."""
    if not frames:
        return "PyTorch's own threads: the backward pass"
    own_frames = [frame for frame in frames if not of_library(frame)]
    frame = own_frames[0] if own_frames else frames[0]
    return f"{frame['filename'].removeprefix(os.environ['EMULATED_FROM'])}:{frame['line']} in {frame['name']}"


def function_of(frames: Any) -> str:
    """`, by forward in transformers/models/…`: the innermost, if it is a library's. Of another version it has the same
    name, on another line."""
    if not frames or not of_library(frames[0]):
        return ""
    file = frames[0]["filename"]
    folder = max((place for place in sys.path if file.startswith(place + os.sep)), key=len, default="")
    return f", by {frames[0]['name']} in {file.removeprefix(folder + os.sep)}"


def of_library(frame: Any) -> bool:
    libraries = (sys.prefix, sys.base_prefix, "<frozen", *os.environ["PYTHONPATH"].split(os.pathsep))
    return bool(frame["filename"].startswith(libraries))


def answer_the_watchman() -> None:
    """A signal from outside writes down where the program is: it may wait for a value that never comes. An interrupt
    ends it with a report, also where a shell's job in the background has inherited that interrupts are ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    stack = open(Path(os.environ["EMULATED_REPORTS"], f"where-{os.getpid()}"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


if os.environ.get("EMULATED_STUBS"):
    load_stubs()
    if os.environ.get("EMULATED_REPORTS"):
        answer_the_watchman()
import_the_next()
