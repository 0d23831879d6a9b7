"""What PyTorch's memory history tells: who held most at the peak, what grows from step to step, what was reserved.

A history is what `torch.cuda.memory._snapshot()` returns, from an emulated card or from a real one: plain lists and
dicts. Nothing here needs PyTorch, or the workbench.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

CHANGE = {"free_completed": 1, "alloc": -1}  # of the bytes in use, going back
# of the bytes reserved
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
LINES = 10
LEAST_GROWTH = 100_000  # bytes a step: less is a counter, or a loss without its graph
LEAST_STEPS = 4
MOST_STEPS = 50
# files that torch.compile writes, wherever TORCHINDUCTOR_CACHE_DIR puts them
COMPILED = re.compile(r"[/\\]torchinductor_|[/\\](?P<two>\w\w)[/\\]c(?P=two)\w{48,}\.py$")
# not the program's own: installed packages, Python's, PyTorch's in the emulator's place, and generated code
LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|[/\\]torch-[\w.]+-python3\.\d+[/\\]"
    rf"|[/\\]emulator[/\\]inside[/\\]|^<frozen|^<eval_with_key>|^/build/|{COMPILED.pattern}"
)
OURS = re.compile(r"[/\\]emulator[/\\]inside[/\\]")
# frames of C++, of which most snapshots have some
NATIVE = re.compile(r"^(\?\?)?$|\.(c|cc|cpp|cu|h|hpp|cuh)$")


def living(snapshot: Any, index: int) -> dict[int, dict[str, Any]]:
    """Each block in use at the end, by address: its `size` as it was asked for, and the `frames` of who did.

    PyTorch writes a block from before the history without frames, like one of the backward pass's threads, whose
    request stands in the history.
    """
    blocks_in_use = {}
    for segment in snapshot["segments"]:
        if segment.get("device", 0) == index:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    size = block.get("requested_size", block["size"])
                    blocks_in_use[block.get("address", address)] = {"size": size, "frames": block.get("frames") or None}
                # before PyTorch 2.2 blocks had no addresses: they follow one another
                address += block["size"]
    return blocks_in_use


def alive_at_the_peak(trace: Any, blocks_in_use: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Back from the end, to find the instant of the peak that the history still holds.

    Returns:
        The blocks alive there: the `size` of each, and the `frames` of who allocated it; None where the history
        begins later.
    """
    # from the end of the history to its beginning
    usage = [sum(block["size"] for block in blocks_in_use.values())]
    for event in reversed(trace):
        usage.append(usage[-1] + CHANGE.get(event["action"], 0) * event.get("size", 0))
    instant = len(trace) - usage.index(max(usage))  # of several, the last in time
    alive = dict(blocks_in_use)
    for event in reversed(trace[instant:]):
        if event["action"] == "alloc":
            alive.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            alive[event["addr"]] = {"size": event["size"], "frames": None}
    for event in trace[:instant]:
        if event["action"] == "alloc" and event["addr"] in alive:
            alive[event["addr"]] = {"size": alive[event["addr"]]["size"], "frames": event.get("frames", [])}
    return list(alive.values())


def at_the_peak(trace: Any, blocks_in_use: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Who held the bytes of the peak, by line."""
    lines = Counter[str]()
    for block in alive_at_the_peak(trace, blocks_in_use):
        lines[program_line(block["frames"])] += block["size"]
    most = [{"line": line, "bytes": size} for line, size in lines.most_common(LINES)]
    return {"lines": most, "peak_in_history_bytes": sum(lines.values())}


def growth(trace: Any, marks: list[int]) -> dict[str, Any] | None:
    """What grows from mark to mark, each the microsecond at which a step ended; None where nothing does.

    A line counts whose bytes in use never shrink from one mark to the next, and rise at half of them at least.
    """
    first = trace[0].get("time_us") if trace else None
    if first is None:  # before PyTorch 2.2 a history knows no time
        return None
    marks = [mark for mark in marks if mark >= first][-MOST_STEPS:]
    if len(marks) < LEAST_STEPS:
        return None
    bytes_at = _bytes_by_line(trace, marks)
    steps = len(marks) - 1
    lines: list[dict[str, Any]] = []
    for line in bytes_at[-1]:
        sizes = [counted[line] for counted in bytes_at]
        rises = changes(sizes)
        if min(rises) >= 0 and 2 * sum(rise > 0 for rise in rises) >= steps:
            lines.append({"line": line, "bytes_a_step": sum(rises) // steps})
    lines.sort(key=lambda entry: -entry["bytes_a_step"])
    total = sum(entry["bytes_a_step"] for entry in lines)
    if total < LEAST_GROWTH:
        return None
    return {"steps": steps, "bytes_a_step": total, "lines": lines[:LINES]}


def changes(amounts: list[int]) -> list[int]:
    """From each amount to the next."""
    return [amounts[number + 1] - amounts[number] for number in range(len(amounts) - 1)]


def _bytes_by_line(trace: Any, marks: list[int]) -> list[Counter[str]]:
    """At each mark, the bytes in use that were allocated since the history's beginning, by line."""
    blocks: dict[int, tuple[str, int]] = {}
    now = Counter[str]()
    at_marks = []
    waiting = list(reversed(marks))
    for event in trace:
        while waiting and event["time_us"] > waiting[-1]:
            waiting.pop()
            at_marks.append(now.copy())
        if event["action"] == "alloc":
            block = program_line(event.get("frames")), event["size"]
            blocks[event["addr"]] = block
            now[block[0]] += block[1]
        elif event["action"] == "free_completed" and event["addr"] in blocks:
            line, size = blocks.pop(event["addr"])
            now[line] -= size
    return [*at_marks, *(now.copy() for _ in waiting)]


def reserved_after_refusals(trace: Any, snapshot: Any, index: int) -> int | None:
    """The most that was reserved since the program, refused for the last time, asked the card for memory again.

    What it had held by then is what did not fit. None where nothing was refused, as far as the history goes back.
    """
    since: list[int] | None = None  # changes of what is reserved
    for event in trace:
        if event["action"] == "oom":
            since = []
        elif since is not None:
            since.append(SEGMENTS.get(event["action"], 0) * event["size"])
    if since is None:
        return None
    at_the_end = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == index)
    reserved = at_the_end - sum(since)
    most = 0
    for change in since:
        reserved += change
        if change > 0 or most:
            most = max(most, reserved)
    return most or at_the_end


def program_line(frames: Any) -> str:
    """The innermost line of the program itself; of a library's, where none is the program's."""
    if frames is None:
        return "before the history begins"
    frames = [frame for frame in frames if not NATIVE.search(frame["filename"])]
    if not frames:
        return "PyTorch's own threads: the backward pass"
    frames = [frame for frame in frames if not OURS.search(frame["filename"])] or frames
    own_frames = [frame for frame in frames if not LIBRARY.search(frame["filename"])]
    if not own_frames and COMPILED.search(frames[0]["filename"]):
        return "what torch.compile made of the backward pass"
    frame = own_frames[0] if own_frames else frames[0]
    started_in = os.environ.get("EMULATED_FROM", "")
    file = frame["filename"]
    if started_in and file.startswith(started_in):
        file = file[len(started_in) :]
    return f"{file}:{frame['line']} in {frame['name']}"
