"""The evaluation of PyTorch's memory history: who held most at the peak, what grows with each step, what was reserved.

A history is a part of what `torch.cuda.memory._snapshot()` returns, from an emulated GPU or from a real one: plain
lists and dicts. This file needs neither PyTorch nor the workbench.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

CHANGE = {"free_completed": 1, "alloc": -1}  # the sign by which bytes in use change at an event, read backwards
# The sign by which reserved bytes change at an event.
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
LINES = 10  # lines of the program that a report has, the largest
LEAST_GROWTH = 100_000  # bytes a step: less is a counter, or a loss without its graph
LEAST_STEPS = 4  # the number of steps that growth must last to be reported
MOST_STEPS = 50  # the number of steps that are compared, the last ones
# torch.compile writes files of such names, wherever TORCHINDUCTOR_CACHE_DIR puts them.
COMPILED = re.compile(r"[/\\]torchinductor_|[/\\](?P<two>\w\w)[/\\]c(?P=two)\w{48,}\.py$")
# These files are not the program's own: installed packages, Python's, PyTorch's in the emulator's cache, this folder's,
# and generated code.
LIBRARY = re.compile(
    r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]|[/\\]torch-[\w.]+-python3\.\d+[/\\]"
    rf"|[/\\]emulator[/\\]inside[/\\]|^<frozen|^<eval_with_key>|^/build/|{COMPILED.pattern}"
)
OURS = re.compile(r"[/\\]emulator[/\\]inside[/\\]")
# These are files of C++, of which most snapshots have frames.
NATIVE = re.compile(r"^(\?\?)?$|\.(c|cc|cpp|cu|h|hpp|cuh)$")


def find_blocks_in_use(snapshot: Any, index: int) -> dict[int, dict[str, Any]]:
    """Return each block in use at the end, by address: the `size` that was asked for, and the `frames` of who asked.

    Frames are None for a block from before the history. PyTorch also writes none for a block that a thread of the
    backward pass has asked for; that request stands in the history.
    """
    blocks_in_use = {}
    for segment in snapshot["segments"]:
        if segment.get("device", 0) == index:
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    size = block.get("requested_size", block["size"])
                    blocks_in_use[block.get("address", address)] = {"size": size, "frames": block.get("frames") or None}
                # Before PyTorch 2.2 blocks had no addresses; they follow one another.
                address += block["size"]
    return blocks_in_use


def find_blocks_at_peak(trace: Any, blocks_in_use: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Find the instant of the highest usage that the history still holds, and return the blocks alive then.

    The usage is known at the end, so that the history is read backwards.

    Returns:
        The `size` of each block, and the `frames` of who allocated it; None for a block from before the history.
    """
    # `usage` lists the bytes in use from the end of the history to its beginning.
    usage = [sum(block["size"] for block in blocks_in_use.values())]
    for event in reversed(trace):
        usage.append(usage[-1] + CHANGE.get(event["action"], 0) * event.get("size", 0))
    instant = len(trace) - usage.index(max(usage))  # if several are equal, `index` finds the last in time
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


def report_peak(trace: Any, blocks_in_use: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Report who held the bytes of the peak: the largest `lines`, and the sum of all, `peak_in_history_bytes`."""
    lines = Counter[str]()
    for block in find_blocks_at_peak(trace, blocks_in_use):
        lines[program_line(block["frames"])] += block["size"]
    most = [{"line": line, "bytes": size} for line, size in lines.most_common(LINES)]
    return {"lines": most, "peak_in_history_bytes": sum(lines.values())}


def report_growth(trace: Any, marks: list[int]) -> dict[str, Any] | None:
    """Report the lines that hold more bytes from mark to mark; None if nothing grows.

    A line grows if its bytes in use never shrink from one mark to the next, and rise at half of them at least.

    Args:
        marks: the microseconds at which steps ended.
    """
    first = trace[0].get("time_us") if trace else None
    if first is None:  # before PyTorch 2.2 a history has no times
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
    """Return the differences from each amount to the next."""
    return [amounts[number + 1] - amounts[number] for number in range(len(amounts) - 1)]


def _bytes_by_line(trace: Any, marks: list[int]) -> list[Counter[str]]:
    """Return for each mark the bytes in use that were allocated since the history's beginning, by line."""
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


def most_reserved_after_refusals(trace: Any, snapshot: Any, index: int) -> int | None:
    """Return the most bytes that a card reserved after the last refusal, from the next request that it granted on.

    What was reserved at the refusal itself did not fit, and does not count. If no request was granted afterwards, it is
    what was reserved at the end. None if the history has no refusal.
    """
    changes_since: list[int] | None = None  # changes of the reserved bytes since the last refusal
    for event in trace:
        if event["action"] == "oom":
            changes_since = []
        elif changes_since is not None:
            changes_since.append(SEGMENTS.get(event["action"], 0) * event["size"])
    if changes_since is None:
        return None
    at_the_end = sum(segment["total_size"] for segment in snapshot["segments"] if segment["device"] == index)
    reserved = at_the_end - sum(changes_since)
    most = 0
    for change in changes_since:
        reserved += change
        if change > 0 or most:
            most = max(most, reserved)
    return most or at_the_end


def program_line(frames: Any) -> str:
    """Return the program's own innermost line, as `file:line in function`; if there is none, a library's innermost."""
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
