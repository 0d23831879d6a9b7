"""PyTorch's memory snapshots, of any card and any program: who held the peak, the segments, the difference of two.

A snapshot is the pickle that `torch.cuda.memory._dump_snapshot(FILE)` writes. It is read without being executed: a
pickle may call any function of Python, and one that names a single function is refused.
"""

import pickle
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.base.categories import format_bytes
from workbench.base.errors import ConfigurationError, explain_errors
from workbench.base.result import Result
from workbench.gpus.emulator.inside._emulated_history import find_blocks_at_peak, find_blocks_in_use, program_line

LINES = 8  # lines of the program, or kinds of memory, that a table shows
SEGMENTS = 8  # segments that are drawn, the largest ones
WIDTH = 40  # characters of a drawn segment
BY_LINE = "by the innermost line of the program"
BY_KIND = "by kind, as the functions' names tell"
HOW_TO_WRITE = (
    "Write one with torch.cuda.memory._record_memory_history(), the program, and "
    "torch.cuda.memory._dump_snapshot('step.pickle')"
)
# Each row is a kind of memory and two patterns, of a frame's file and of its function. The innermost frame that matches
# both decides; of two rows the first.
KINDS = (
    ("optimizer", r"[/\\](optim|optimizers?)[/\\]|optimizer|bitsandbytes", r""),
    ("activations, computed again", r"[/\\]checkpoint\.py$", r"recompute|unpack_hook|backward"),
    ("backward pass", r"[/\\]autograd[/\\]|^\?\?$", r"backward|autograd"),
    ("weights", r"", r"^(_apply|convert|to|cuda|reset_parameters|from_pretrained|load_state_dict|_load\w*)$"),
    ("weights", r"[/\\]nn[/\\]modules[/\\]", r"^__init__$"),
    ("forward pass", r"", r"forward|_call_impl"),
)


class _NamesNothing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ConfigurationError(
            f"snapshot: this pickle wants to call {module}.{name}, "
            "and a memory snapshot of PyTorch is plain lists and numbers. It was not executed. "
            f"{HOW_TO_WRITE}."
        )


def read_snapshot(path: Path) -> "Snapshot":
    """Read a snapshot's file: its devices that hold, or held, memory.

    Raises:
        ConfigurationError: it is no pickle, or one that is no such snapshot, or that would execute something.
        OSError: the file cannot be read.
    """
    complaint = f"snapshot: {path} is no memory snapshot"
    with path.open("rb") as file, explain_errors(complaint, f"{HOW_TO_WRITE}.", OSError):
        content = _NamesNothing(file).load()
        if isinstance(content, list):  # torch.cuda.memory_snapshot() returns the segments alone
            content = {"segments": content}
        traces = dict(enumerate(content.get("device_traces", [])))
        segments: dict[int, list[Segment]] = {}
        for segment in content["segments"]:
            segments.setdefault(segment.get("device", 0), []).append(_segment(segment))
        devices = []
        for index in sorted(traces | segments):
            trace = traces.get(index, [])
            if trace or index in segments:
                devices.append(_device(index, segments.get(index, []), trace, find_blocks_in_use(content, index)))
    return Snapshot(str(path), tuple(devices))


def _device(
    index: int,
    segments: list["Segment"],
    trace: list[dict[str, Any]],
    blocks_in_use: Any,
) -> "DeviceSnapshot":
    lines = Counter[str]()
    kinds = Counter[str]()
    for block in find_blocks_at_peak(trace, blocks_in_use):
        lines[program_line(block["frames"])] += block["size"]
        kinds[_kind(block["frames"])] += block["size"]
    refused = [event["size"] for event in trace if event["action"] == "oom"]
    return DeviceSnapshot(
        index,
        Counter(dict(lines.most_common())),
        Counter(dict(kinds.most_common())),
        tuple(segments),
        len(trace),
        refused,
    )


def _kind(frames: list[dict[str, Any]] | None) -> str:
    if frames is None:
        return "before the history begins"
    for frame in frames:
        for memory, file, function in KINDS:
            if re.search(file, frame["filename"]) and re.search(function, frame["name"]):
                return memory
    # The backward pass runs in threads of PyTorch, which have no frames of Python.
    return "data and others" if frames else "backward pass"


def _segment(segment: dict[str, Any]) -> "Segment":
    """Read a segment of a snapshot: its blocks as (bytes, in use) from its beginning. A block that waits for a stream
    is in use."""
    blocks = [(block["size"], block["state"] != "inactive") for block in segment["blocks"]]
    return Segment(segment["total_size"], tuple(blocks))


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator holds in one piece."""

    size: int
    blocks: tuple[tuple[int, bool], ...]

    @property
    def bytes_in_use(self) -> int:
        return sum(size for size, in_use in self.blocks if in_use)

    def __str__(self) -> str:
        """Draw the segment: `█` is in use, `░` free, `▒` both."""
        used = [0.0] * WIDTH
        position = 0
        for size, in_use in self.blocks:
            if in_use:
                begin = position * WIDTH / self.size
                end = (position + size) * WIDTH / self.size
                for column in range(int(begin), min(int(end) + 1, WIDTH)):
                    used[column] += min(end, column + 1) - max(begin, column)
            position += size
        return "".join(map(_shade, used))


def _shade(share: float) -> str:
    if share > 0.99:
        return "█"
    return "░" if share < 0.01 else "▒"


@dataclass(frozen=True)
class DeviceSnapshot(Result):
    """One card: bytes at the peak of its history by line and by kind, the most first, and its segments at the end.

    Attributes:
        device: the card's number.
        events: the number of entries of the history; without any, the peak is what was in use at the end.
        refused_bytes: the size of each request that was refused.
    """

    device: int
    lines: Counter[str]
    kinds: Counter[str]
    segments: tuple[Segment, ...]
    events: int
    refused_bytes: list[int]
    json_fields = (
        "device",
        "peak_bytes",
        "lines",
        "kinds",
        "reserved_bytes",
        "bytes_in_use",
        "largest_free_bytes",
        "refused_bytes",
        "events",
    )

    @property
    def peak_bytes(self) -> int:
        return self.lines.total()

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def bytes_in_use(self) -> int:
        return sum(segment.bytes_in_use for segment in self.segments)

    @property
    def largest_free_bytes(self) -> int:
        """The bytes of the largest block that is reserved and free: a larger request needs new memory or is refused."""
        largest = 0
        for segment in self.segments:
            for size, in_use in segment.blocks:
                if not in_use:
                    largest = max(largest, size)
        return largest

    def __str__(self) -> str:
        when = f"of {self.events:,} events" if self.events else "(it has no history: what was in use at the end)"
        lines = [f"device {self.device}: peak {format_bytes(self.peak_bytes)} allocated, {when}"]
        if self.refused_bytes:
            lines.append(f"  refused: {', '.join(map(format_bytes, self.refused_bytes[-LINES:]))}")
        lines += _table(BY_LINE, self.lines)
        lines += _table(BY_KIND, self.kinds)
        free = self.reserved_bytes - self.bytes_in_use
        lines.append(
            f"  at the end {format_bytes(self.reserved_bytes)} reserved in {len(self.segments)} "
            f"segments, {format_bytes(self.bytes_in_use)} in use; {format_bytes(free)} free, "
            f"{format_bytes(self.largest_free_bytes)} at most in one piece"
        )
        largest = sorted(self.segments, key=lambda segment: -segment.size)
        for segment in largest[:SEGMENTS]:
            lines.append(f"    {format_bytes(segment.size):>9}  {segment}  {format_bytes(segment.bytes_in_use)} in use")
        if len(largest) > SEGMENTS:
            rest = format_bytes(sum(segment.size for segment in largest[SEGMENTS:]))
            lines.append(f"    {rest:>9}  in {len(largest) - SEGMENTS} smaller segments")
        return "\n".join(lines)


@dataclass(frozen=True)
class Snapshot(Result):
    """The content of a snapshot's file, card by card."""

    file: str
    devices: tuple[DeviceSnapshot, ...]
    json_fields = ("file", "devices")

    def __str__(self) -> str:
        if not self.devices:
            return f"{self.file}: no card holds memory, and there is no history"
        return "\n".join([self.file, *map(str, self.devices)])


@dataclass(frozen=True)
class SnapshotDifference(Result):
    """The difference of two snapshots at their peaks, card by card."""

    before: Snapshot
    after: Snapshot

    def changes(self) -> list[dict[str, Any]]:
        """Return for each card, JSON-ready, by how many bytes its peak has changed, and each line and kind of it."""
        first = {device.device: device for device in self.before.devices}
        second = {device.device: device for device in self.after.devices}
        nothing = DeviceSnapshot(0, Counter(), Counter(), (), 0, [])
        rows = []
        for index in sorted(first | second):
            old = first.get(index, nothing)
            new = second.get(index, nothing)
            rows.append(
                {
                    "device": index,
                    "peak_bytes": new.peak_bytes - old.peak_bytes,
                    "lines": _change(old.lines, new.lines),
                    "kinds": _change(old.kinds, new.kinds),
                }
            )
        return rows

    def __str__(self) -> str:
        lines = [f"from {self.before.file} to {self.after.file}"]
        for change in self.changes():
            lines.append(f"device {change['device']}: peak {_with_sign(change['peak_bytes'])}")
            lines += _table(BY_LINE, change["lines"], _with_sign)
            lines += _table(BY_KIND, change["kinds"], _with_sign)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the two files' names and the changes, JSON-ready; bytes are integers."""
        return {"before": self.before.file, "after": self.after.file, "devices": self.changes()}


def _change(old: Counter[str], new: Counter[str]) -> dict[str, int]:
    return {name: new[name] - old[name] for name in old | new if new[name] != old[name]}


def _with_sign(size: float) -> str:
    return f"{'+' if size >= 0 else '−'}{format_bytes(abs(size))}"


def _table(title: str, sizes: Mapping[str, int], write: Any = format_bytes) -> list[str]:
    """Return the lines of a table: a title, and the largest entries, each with its bytes."""
    entries = sorted(sizes.items(), key=lambda entry: -abs(entry[1]))
    lines = [f"  {title}"]
    for name, size in entries[:LINES]:
        lines.append(f"    {write(size):>9}  {name}")
    if len(entries) > LINES:
        rest = sum(size for _, size in entries[LINES:])
        lines.append(f"    {write(rest):>9}  {len(entries) - LINES} others (--json has them)")
    return lines
