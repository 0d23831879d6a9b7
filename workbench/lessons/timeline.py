"""The step, scrubbable: a prediction's timeline as one page that needs no network, no kernel and no library.

`timeline.html` is the page; what it shows is in it, compressed. It comes in an `<iframe srcdoc>`, since a script runs
there wherever the frame is put: in a widget, in the output of a cell, in a built page.
"""

import base64
import html
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import ConfigurationError
from workbench.gpus.catalogue import GPUS
from workbench.lessons.plots import COLOURS
from workbench.measure.categories import Phase, format_bytes
from workbench.predict.engine import engine_words
from workbench.predict.prediction import Prediction
from workbench.predict.tensors import TensorTimeline

PAGE = Path(__file__).with_name("timeline.html")
SMALL = 1e-5  # of the peak: the coming and going of so small a tensor is shown together with the next larger one's
PHASES = list(Phase)
IN_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP)


def scrubber(predictions: Sequence[Prediction], capacity_bytes: int | None = None) -> str:
    """HTML of a frame with the memory of each prediction's last step, one above the other on one scale.

    Args:
        capacity_bytes: what the allocator may have, such as a budget; None: what the GPU has, less CUDA's context.

    Raises:
        ConfigurationError: there is nothing to show, or a prediction has no timeline.
    """
    if not predictions or any(p.timeline is None for p in predictions):
        raise ConfigurationError("scrubber: a prediction has no timeline. Pass what `predict` returned, one or two.")
    return frame([step_of(p.timeline) | _facts(p, capacity_bytes) for p in predictions if p.timeline is not None])


def frame(steps: Sequence[dict[str, Any]]) -> str:
    """HTML of a frame with these steps, as `step_of` makes them, each with a `title` and what else the page can say."""
    told = {"colours": COLOURS, "steps": steps}
    packed = base64.b64encode(zlib.compress(json.dumps(told).encode(), 9)).decode()
    page = PAGE.read_text(encoding="utf-8").replace("{{packed}}", packed)
    words = f"Memory over the operations of a training step: {', '.join(step['title'] for step in steps)}"
    style = f"width: 100%; height: {300 + 380 * len(steps)}px; border: 0; color-scheme: light dark"
    return f'<iframe title="{html.escape(words)}" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def step_of(timeline: TensorTimeline) -> dict[str, Any]:
    """The last step of a timeline and what follows it, JSON-ready.

    Of every tensor its bytes, its category, its life in events of the page (`born` as differences, the first from -1:
    there before), who made it, and who was at work when it ended. Events of small tensors are merged: what lives
    after each event that stays is the timeline's own, to the byte.
    """
    t, phases = timeline, np.array([-1 if phase is None else PHASES.index(phase) for phase in timeline.phases])
    start, stop = _last_step(phases)
    kept = _kept(t.total[start:stop], phases[start:stop]) + start
    born = np.where(t.born < start, -1, np.searchsorted(kept, t.born))
    died = np.where(t.died < 0, len(kept), np.where(t.died < start, -1, np.searchsorted(kept, t.died)))
    shown = np.flatnonzero((born < died) & (born < len(kept)))
    shown = shown[born[shown].argsort(kind="stable")]
    at_work = _at_work(t)
    arrays = {
        "born": np.diff(born[shown], prepend=-1),
        "life": (died - born)[shown],
        "nbytes": t.nbytes[shown],
        "category": t.category[shown],
        "maker": t.maker[shown],
        "ender": np.where(t.died < 0, -1, at_work[t.died])[shown],
        "operation": at_work[kept],
        "phase": phases[kept],
    }
    plain = {name: array.tolist() for name, array in arrays.items()}
    return plain | {"operations": t.operations, "phases": PHASES, "small": int(SMALL * t.total[start:stop].max())}


def _last_step(phases: NDArray[np.int64]) -> tuple[int, int]:
    """Where it begins, and where what follows it ends: a shadow has several steps, between evaluations."""
    within = np.isin(phases, [PHASES.index(phase) for phase in IN_A_STEP])
    if not within.any():
        return 0, len(phases)
    before = np.flatnonzero(~within[: np.flatnonzero(within)[-1]])
    return int(before.max(initial=-1)) + 1, int(np.flatnonzero(phases >= 0)[-1]) + 1


def _kept(total: NDArray[np.int64], phases: NDArray[np.int64]) -> NDArray[np.int64]:
    """The events that are shown: those of large tensors, a phase's first, the peak and the last."""
    keep = np.abs(np.diff(total, prepend=0)) >= SMALL * total.max()
    keep |= np.diff(phases, prepend=-2) != 0
    keep[[total.argmax(), -1]] = True
    return np.flatnonzero(keep)


def _at_work(t: TensorTimeline) -> NDArray[np.int64]:
    """For every event the operation that made the newest tensor."""
    births = np.zeros(len(t.phases), dtype=np.int64)
    births[t.born] = t.born
    made = np.zeros(len(t.phases), dtype=np.int64)
    made[t.born] = t.maker
    return np.asarray(made[np.maximum.accumulate(births)])


def _facts(p: Prediction, budget_bytes: int | None) -> dict[str, Any]:
    """What the page says of a prediction in words, and the limit of what its allocator may reserve."""
    card = GPUS[p.gpu].title if p.gpu in GPUS else "this machine's CPU"
    limit, words = budget_bytes, f"the limit of {format_bytes(budget_bytes or 0)}"
    if limit is None and p.capacity_bytes is not None:
        limit = p.capacity_bytes - p.context_bytes
        words = f"{format_bytes(p.capacity_bytes)} of {card} less {format_bytes(p.context_bytes)} of CUDA's context"
    return {
        "title": f"{p.label} on {p.model}",
        "source": f"predicted for {card} by {engine_words(p.source)}, not measured",
        "micro_batch": [p.micro_batch_size, p.recipe["sequence_length"], p.gradient_accumulation_steps],
        "allocated": p.peak_allocated_bytes,
        "reserved": p.peak_reserved_bytes,
        "limit": limit,
        "limit_words": words,
    }
