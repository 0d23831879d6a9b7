"""Sum up what a memory snapshot says of the allocator, so that two can be compared: layout.py SNAPSHOT.pickle

Segments are told by their bytes and their blocks, from the beginning, `+` in use and `-` free, and counted, as their
addresses are another's. Of the history what was requested and what was freed is kept in its order, by a digest of the
bytes. `data/reference/real/segments.json` has these of real cards' snapshots, as this program printed them.
"""

import hashlib
import json
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SIGNS = {"alloc": "+", "free_completed": "-"}


def layout(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Sum up a snapshot's first device: its bytes, how often each kind of segment is there, the history's requests."""
    segments = Counter(segment_text(segment) for segment in snapshot["segments"])
    requests = []
    for event in snapshot["device_traces"][0]:
        if event["action"] in SIGNS:
            sign = SIGNS[event["action"]]
            requests.append(f"{sign}{event['size']}")
    digest = hashlib.sha256(" ".join(requests).encode())
    return {
        "reserved": bytes_of_segments(snapshot),
        "segments": dict(sorted(segments.items())),
        "requests": len(requests),
        "digest": digest.hexdigest()[:16],
    }


def segment_text(segment: dict[str, Any]) -> str:
    """Return `2048: +512 -1536` for a segment of 2,048 bytes whose first 512 are in use."""
    blocks = []
    for block in segment["blocks"]:
        sign = "-" if block["state"] == "inactive" else "+"
        blocks.append(f"{sign}{block['size']}")
    return f"{segment['total_size']}: {' '.join(blocks)}"


def bytes_of_segments(snapshot: dict[str, Any]) -> int:
    return sum(segment["total_size"] for segment in snapshot["segments"])


class _NamesNothing(pickle.Unpickler):
    """A snapshot is lists and numbers; a pickle that names a function might call it."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"this pickle names {module}.{name}: it is no memory snapshot")


if __name__ == "__main__":
    with Path(sys.argv[1]).open("rb") as file:
        content = _NamesNothing(file).load()
    print(json.dumps(layout(content), indent=1))
