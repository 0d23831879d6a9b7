"""The step to drag through: a prediction's timeline as one page that needs no network, no kernel and no library.

`timeline.html` is the page, with its data inside, compressed. It comes in an `<iframe srcdoc>`, since a script runs
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

from workbench.base.errors import ConfigurationError
from workbench.base.operations import operation_in_words
from workbench.gpus.catalogue import GPUS
from workbench.lessons.plots import COLOURS
from workbench.measure.timeline import TensorTimeline
from workbench.prediction.prediction import Prediction, engine_words
from workbench.techniques.registry import in_words

PAGE = Path(__file__).with_name("timeline.html")
NOTHING = "scrubber: a prediction has no timeline. Pass what `predict` returned, one or two."
FACTS = (
    "model",
    "capacity_bytes",
    "context_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "micro_batch_size",
    "gradient_accumulation_steps",
)


def scrubber(predictions: Sequence[Prediction], capacity_bytes: int | None = None) -> str:
    """Return HTML of a frame with the memory of each prediction's last step, one above the other on one scale.

    Args:
        capacity_bytes: the bytes that the allocator may have, such as a budget; None: the GPU's, less CUDA's context.

    Raises:
        ConfigurationError: there is nothing to show, or a prediction has no timeline.
    """
    if not predictions:
        raise ConfigurationError(NOTHING)
    steps = list(map(_facts, predictions))
    shown = json.dumps([steps, COLOURS, capacity_bytes])
    packed = base64.b64encode(zlib.compress(shown.encode())).decode()
    page = PAGE.read_text(encoding="utf-8").replace("{{packed}}", packed)
    labels = ", ".join(in_words(prediction.label) for prediction in predictions)
    title = html.escape(f"Memory over the operations of a training step: {labels}")
    style = f"width: 100%; height: {300 + 380 * len(steps)}px; border: 0; color-scheme: light dark"
    # the frame stands in a div, since IPython warns of HTML that is a frame
    return f'<div><iframe title="{title}" style="{style}" srcdoc="{html.escape(page)}"></iframe></div>'


def _facts(prediction: Prediction) -> dict[str, Any]:
    """Return the facts that the page shows of a prediction, JSON-ready."""
    if prediction.timeline is None:
        raise ConfigurationError(NOTHING)
    facts = {name: getattr(prediction, name) for name in FACTS}
    facts["label"] = in_words(prediction.label)
    facts["sequence_length"] = prediction.recipe_settings["sequence_length"]
    card = GPUS.get(prediction.gpu)
    facts["card"] = card.title if card else "this machine's CPU"
    facts["engine"] = engine_words(prediction.source)
    return facts | lives_of(prediction.timeline)


def lives_of(timeline: TensorTimeline) -> dict[str, Any]:
    """Return a timeline, JSON-ready.

    `born` is written as differences, which are short; `died` as the number of events that a tensor lives, -1 if it
    outlives them all. `words` are the operations in words, in the order of `operations`.
    """
    lives = dict(timeline.lives)
    born = lives["born"]
    died = lives["died"]
    lives["born"] = np.diff(born, prepend=0)
    lives["died"] = np.where(died < 0, -1, died - born)
    arrays = {name: array.tolist() for name, array in lives.items()}
    return {
        **arrays,
        "operations": timeline.operations,
        "words": list(map(operation_in_words, timeline.operations)),
        "phases": timeline.phases,
    }
