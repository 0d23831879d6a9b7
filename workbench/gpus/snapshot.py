"""PyTorch's memory snapshots, of any card and any program: who held the peak, what lies where, what two differ in.

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
from workbench.base.errors import ConfigurationError, explained
from workbench.base.result import Result
from workbench.gpus.emulator.inside._emulated_history import alive_at_the_peak, living, program_line

LINES = 8
SEGMENTS = 8
WIDTH = 40
BY_LINE = "by the innermost line of the program"
BY_KIND = "by kind, as the functions' names tell"
HOW_TO_WRITE = (
    "Write one with torch.cuda.memory._record_memory_history(), the program, and "
    "torch.cuda.memory._dump_snapshot('step.pickle')"
)
# by the innermost frame that says it: kind of memory, its file, its function
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
    """The devices of a snapshot that hold, or held, memory.

    Raises:
        ConfigurationError: no pickle, or one that is not such a snapshot, or that would execute something.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file, explained(f"snapshot: {path} is no memory snapshot", f"{HOW_TO_WRITE}.", OSError):
        content = _NamesNothing(file).load()
        if isinstance(content, list):  # of torch.cuda.memory_snapshot()
            content = {"segments": content}
        traces = dict(enumerate(content.get("device_traces", [])))
        segments: dict[int, list[Segment]] = {}
        for segment in content["segments"]:
            segments.setdefault(segment.get("device", 0), []).append(_segment(segment))
        devices = []
        for index in sorted(traces | segments):
            trace = traces.get(index, [])
            if trace or index in segments:
                devices.append(_device(index, segments.get(index, []), trace, living(content, index)))
    return Snapshot(path, tuple(devices))


def _device(
    index: int,
    segments: list["Segment"],
    trace: list[dict[str, Any]],
    blocks_in_use: Any,
) -> "DeviceSnapshot":
    lines = Counter[str]()
    kinds = Counter[str]()
    for block in alive_at_the_peak(trace, blocks_in_use):
        lines[program_line(block["frames"])] += block["size"]
        kinds[_kind(block["frames"])] += block["size"]
    refused = [event["size"] for event in trace if event["action"] == "oom"]
    return DeviceSnapshot(index, lines, kinds, tuple(segments), len(trace), refused)


def _kind(frames: list[dict[str, Any]] | None) -> str:
    if frames is None:
        return "before the history begins"
    for frame in frames:
        for memory, file, function in KINDS:
            if re.search(file, frame["filename"]) and re.search(function, frame["name"]):
                return memory
    # which runs in threads of PyTorch's own
    return "data and others" if frames else "backward pass"


def _segment(segment: dict[str, Any]) -> "Segment":
    """Its blocks as (bytes, in use) from its beginning; what waits for a stream is in use."""
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
        """Drawn: `█` is in use, `░` free, `▒` both."""
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
class DeviceSnapshot:
    """One card: bytes at the peak of its history by line and by kind, and its segments at the end.

    Attributes:
        events: how many entries the history has; without any, the peak is what was in use at the end.
        refused: bytes of the requests that were refused.
    """

    index: int
    lines: Counter[str]
    kinds: Counter[str]
    segments: tuple[Segment, ...]
    events: int
    refused: list[int]

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
        """Of the blocks that are reserved and free: a larger request needs new memory, or is refused."""
        largest = 0
        for segment in self.segments:
            for size, in_use in segment.blocks:
                if not in_use:
                    largest = max(largest, size)
        return largest

    def __str__(self) -> str:
        when = f"of {self.events:,} events" if self.events else "(it has no history: what was in use at the end)"
        lines = [f"device {self.index}: peak {format_bytes(self.peak_bytes)} allocated, {when}"]
        if self.refused:
            lines.append(f"  refused: {', '.join(map(format_bytes, self.refused[-LINES:]))}")
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

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are integers."""
        return {
            "device": self.index,
            "peak_bytes": self.peak_bytes,
            "lines": dict(self.lines.most_common()),
            "kinds": dict(self.kinds.most_common()),
            "reserved_bytes": self.reserved_bytes,
            "bytes_in_use": self.bytes_in_use,
            "largest_free_bytes": self.largest_free_bytes,
            "refused_bytes": self.refused,
            "events": self.events,
        }


@dataclass(frozen=True)
class Snapshot(Result):
    """What a file tells of each card."""

    path: Path
    devices: tuple[DeviceSnapshot, ...]

    def __str__(self) -> str:
        if not self.devices:
            return f"{self.path}: no card holds memory, and there is no history"
        return "\n".join([f"{self.path}", *map(str, self.devices)])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are integers."""
        return {"file": str(self.path), "devices": [device.to_dict() for device in self.devices]}


@dataclass(frozen=True)
class SnapshotDifference(Result):
    """What a second snapshot holds more, or less, than a first one at its peak, card by card."""

    before: Snapshot
    after: Snapshot

    def changes(self) -> list[dict[str, Any]]:
        """Of each card, JSON-ready and in bytes, how the peak has changed, and each line and kind of it."""
        first = {device.index: device for device in self.before.devices}
        second = {device.index: device for device in self.after.devices}
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
        lines = [f"from {self.before.path} to {self.after.path}"]
        for change in self.changes():
            lines.append(f"device {change['device']}: peak {_signed(change['peak_bytes'])}")
            lines += _table(BY_LINE, change["lines"], _signed)
            lines += _table(BY_KIND, change["kinds"], _signed)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are integers."""
        return {"before": str(self.before.path), "after": str(self.after.path), "devices": self.changes()}


def _change(old: Counter[str], new: Counter[str]) -> dict[str, int]:
    return {name: new[name] - old[name] for name in old | new if new[name] != old[name]}


def _signed(size: float) -> str:
    return f"{'+' if size >= 0 else '−'}{format_bytes(abs(size))}"


def _table(title: str, sizes: Mapping[str, int], written: Any = format_bytes) -> list[str]:
    """The largest, each with its bytes."""
    entries = sorted(sizes.items(), key=lambda entry: -abs(entry[1]))
    lines = [f"  {title}"]
    for name, size in entries[:LINES]:
        lines.append(f"    {written(size):>9}  {name}")
    if len(entries) > LINES:
        rest = sum(size for _, size in entries[LINES:])
        lines.append(f"    {written(rest):>9}  {len(entries) - LINES} others (--json has them)")
    return lines
