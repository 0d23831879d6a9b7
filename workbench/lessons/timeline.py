"""The step, scrubbable: a prediction's timeline as one page that needs no network, no kernel and no library.

`timeline.html` is the page; what it shows lies in it, compressed. It comes in an `<iframe srcdoc>`, since a script runs
there wherever the frame is put: in a widget, in the output of a cell, in a built page.
"""

import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.lessons.plots import COLOURS
from workbench.predict.engine import engine_words
from workbench.predict.prediction import Prediction
from workbench.predict.tensors import TensorTimeline

PAGE = Path(__file__).with_name("timeline.html")
OPERATIONS: dict[str, str] = json.loads(Path(__file__).with_name("operations.json").read_text(encoding="utf-8"))
FACTS = (
    "label", "model", "capacity_bytes", "context_bytes", "peak_allocated_bytes", "peak_reserved_bytes",
    "micro_batch_size", "gradient_accumulation_steps",
)  # fmt: skip


def scrubber(predictions: Sequence[Prediction], capacity_bytes: int | None = None) -> str:
    """HTML of a frame with the memory of each prediction's last step, one above the other on one scale.

    Args:
        capacity_bytes: what the allocator may have, such as a budget; None: what the GPU has, less CUDA's context.

    Raises:
        ConfigurationError: there is nothing to show, or a prediction has no timeline.
    """
    if not predictions or any(p.timeline is None for p in predictions):
        raise ConfigurationError("scrubber: a prediction has no timeline. Pass what `predict` returned, one or two.")
    told = [_facts(p) | lives_of(p.timeline) for p in predictions if p.timeline]
    packed = base64.b64encode(zlib.compress(json.dumps([told, COLOURS, capacity_bytes]).encode())).decode()
    page = PAGE.read_text(encoding="utf-8").replace("{{packed}}", packed)
    page = page.replace("{{operations}}", json.dumps(OPERATIONS))
    words = f"Memory over the operations of a training step: {', '.join(p.label for p in predictions)}"
    style = f"width: 100%; height: {300 + 380 * len(told)}px; border: 0; color-scheme: light dark"
    # in a div, since IPython warns of HTML that is a frame
    return f'<div><iframe title="{html.escape(words)}" style="{style}" srcdoc="{html.escape(page)}"></iframe></div>'


def in_words(operation: str) -> str:
    """What an operation computes: of `aten.mm.default in transformer.h.3.mlp` "matrix product"."""
    library, _, rest = operation.partition(" in ")[0].partition(".")
    name = (rest or library).partition(".")[0].lstrip("_").removeprefix("foreach_")
    forward = re.sub(r"_backward(_data)?$", "", name)
    words = OPERATIONS.get(forward, forward.replace("_", " "))
    return words if forward == name else f"gradient of {words}"


def lives_of(timeline: TensorTimeline) -> dict[str, Any]:
    """All of a timeline, JSON-ready; `born` as differences, which are short, and for `died` the events between."""
    born, died = timeline.lives["born"], timeline.lives["died"]
    short = {"born": np.diff(born, prepend=0), "died": np.where(died < 0, -1, died - born)}
    arrays = {name: array.tolist() for name, array in (timeline.lives | short).items()}
    return arrays | {"operations": timeline.operations, "phases": timeline.phases}


def _facts(p: Prediction) -> dict[str, Any]:
    more = {"card": GPUS[p.gpu].title if p.gpu in GPUS else "this machine's CPU", "engine": engine_words(p.source)}
    return {name: getattr(p, name) for name in FACTS} | more | {"sequence_length": p.recipe["sequence_length"]}
