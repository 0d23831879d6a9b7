"""`read_crash(path)`: the causes of a crash, from a pasted message, a log, a notebook or a memory snapshot."""

import codecs
import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from workbench.advise.causes import NOTEWORTHY, Cause, against_gaps, titles_against
from workbench.advise.message import read_message
from workbench.base.categories import Category, format_bytes
from workbench.base.errors import ConfigurationError
from workbench.base.result import Result
from workbench.gpus.snapshot import DeviceSnapshot, Snapshot, read_snapshot

PICKLE = b"\x80"  # the first byte of a pickle
OLDER = "before the history begins"  # a snapshot's kind of the memory that is older than its history
# Kinds of memory in a snapshot, and for each the category that techniques attack.
KINDS = {
    "optimizer": Category.OPTIMIZER_STATES,
    "weights": Category.WEIGHTS,
    "backward pass": Category.GRADIENTS,
    "forward pass": Category.ACTIVATIONS,
    "activations, computed again": Category.ACTIVATIONS,
}


def read_crash(name: str) -> Result:
    """Read the causes that a file allows.

    Args:
        name: the file; `-` is standard input.

    Raises:
        ConfigurationError: the file has no out-of-memory message in it, or is a pickle and no memory snapshot.
    """
    content = _read(name)
    if not content.startswith(PICKLE):
        return read_message(_text(content))
    if name == "-":
        raise ConfigurationError("doctor: a memory snapshot is read from its file. Give its name in place of -.")
    return CrashSnapshot(read_snapshot(Path(name)))


def _read(name: str) -> bytes:
    """Return the bytes of a file, or of standard input if the name is `-`."""
    if name != "-":
        return Path(name).read_bytes()
    if sys.stdin is None:  # it was closed before Python started
        raise ConfigurationError("doctor: standard input is closed. Give the name of a file in place of -.")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:  # a folder, for example, is redirected into it
        raise ConfigurationError(
            f"doctor: standard input cannot be read ({error.strerror}). Give the name of a file in place of -."
        ) from None


def _text(content: bytes) -> str:
    """Decode a file. A notebook becomes the output of its cells.

    Windows' PowerShell writes logs in UTF-16.
    """
    encoding = "utf-8"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    text = content.decode(encoding, errors="replace")
    if not text.lstrip().startswith("{"):
        return text
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        return text
    outputs = []
    for cell in _list_in(notebook, "cells"):
        outputs += _list_in(cell, "outputs")
    if not outputs:
        return text
    lines = []
    for output in outputs:
        lines += [*_list_in(output, "traceback"), *_list_in(output, "text")]
    return "\n".join(map(str, lines))


def _list_in(value: Any, name: str) -> list[Any]:
    """Return the list under a name of a JSON object. A text becomes a list of one; everything else an empty list."""
    entry = value.get(name) if isinstance(value, dict) else None
    if isinstance(entry, str):
        return [entry]
    return entry if isinstance(entry, list) else []


@dataclass(frozen=True)
class CrashSnapshot(Result):
    """A memory snapshot with its causes. Unlike a message, it knows when and where each tensor was made."""

    snapshot: Snapshot
    json_fields = ("causes",)

    @cached_property
    def causes(self) -> tuple[Cause, ...]:
        """The causes on all devices: for each fragmentation, older tensors and the largest kind, where they apply."""
        causes = []
        for device in self.snapshot.devices:
            causes += [no_piece_is_large_enough(device), older_than_the_history(device), largest_kind(device)]
        return tuple(filter(None, causes))

    def __str__(self) -> str:
        return "\n".join(["Causes, as far as the snapshot tells", *map(str, self.causes), "", str(self.snapshot)])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary; bytes are integers."""
        return self.snapshot.to_dict() | super().to_dict()


def no_piece_is_large_enough(device: DeviceSnapshot) -> Cause | None:
    """Blame fragmentation: the request would have fitted into the free memory, had that been in one piece."""
    refused = max(device.refused_bytes, default=0)
    free = device.reserved_bytes - device.bytes_in_use
    if not device.largest_free_bytes < refused <= free:
        return None
    because = (
        f"{format_bytes(refused)} were refused. At the end {format_bytes(free)} are reserved and "
        f"free, at most {format_bytes(device.largest_free_bytes)} in one piece."
    )
    return Cause("fragmentation", because, f"{against_gaps()} in front of the command.", "12_kernels")


def older_than_the_history(device: DeviceSnapshot) -> Cause | None:
    """Blame tensors that are older than the snapshot's history."""
    size = device.kinds[OLDER]
    if not device.events or size < NOTEWORTHY * device.peak_bytes:
        return None
    because = (
        f"{format_bytes(size)} of the {format_bytes(device.peak_bytes)} at the peak were there "
        "before the history begins: the model, if the history was switched on after it was "
        "loaded; else something older."
    )
    return Cause("something left from before", because, "switch the history on before anything is loaded.")


def largest_kind(device: DeviceSnapshot) -> Cause | None:
    """Blame the kind of memory that is largest at the peak."""
    sizes = [(size, kind) for kind, size in device.kinds.items() if kind in KINDS]
    if not sizes or not device.events:
        return None
    size, kind = max(sizes)
    line, at_line = device.lines.most_common(1)[0]
    because = (
        f"The largest part of the peak is {kind}: "
        f"{format_bytes(size)} of {format_bytes(device.peak_bytes)}. "
        f"The line with most of it all: {line}, {format_bytes(at_line)}."
    )
    if not device.refused_bytes:
        because += " No request was refused in its history."
    return Cause("too much", because, f"{titles_against(KINDS[kind], exact=False)}.", "14_planner")
