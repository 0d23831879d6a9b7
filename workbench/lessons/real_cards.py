"""What a lesson teaches, on cards that people have: GPT-2 124M and XL, predicted without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any

import pandas as pd
from IPython.display import HTML

from workbench.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.lessons.timeline import in_words, scrubber
from workbench.measure.categories import Category, format_bytes
from workbench.predict.engine import engine_words
from workbench.predict.predict import Prediction, predict, predict_all
from workbench.recipe import Recipe
from workbench.techniques.base import Technique

CARDS, MODELS = ("t4", "rtx3090"), ("gpt2", "gpt2-xl")
Variant = Technique | tuple[Technique, ...]  # one technique, or several together


def on_real_cards(
    *variants: Variant, gpus: Sequence[str] = CARDS, models: Sequence[str] = MODELS, length: int = 1024
) -> Any:
    """A table: full fine-tuning with 8 × `length` tokens a step, then each variant; its peak, and on which GPU it fits.

    A GPU that cannot run a recipe has the reason in its place. GPUs with the same workspaces allocate the same, so one
    prediction serves them where it decides; where the reserved memory alone is too much, each is asked itself.
    """
    cards = [find_gpu(name) for name in gpus]
    rows = [_row(recipe, cards) for model in models for recipe in _recipes(model, variants, length)]
    words = " and ".join(sorted({row.pop("by", "") for row in rows} - {""}))
    table = pd.DataFrame(rows).set_index(["model", "recipe"]).rename_axis([None, None])
    table = table.replace(r"(?<=\d) (?=\S*B\b)", "\xa0", regex=True)  # a number stays with its unit
    styler = table.style.format(escape="html", na_rep="–").format_index(escape="html", axis=0)
    return styler.set_caption(
        f"8 × {length:,} tokens a step; fp32 and AdamW where nothing else is said. What is left is free beside CUDA's "
        f"context and the bytes reserved. Predicted, not measured, with {words}."
    )


def step_on_card(*variants: Variant, gpu: str = CARDS[0], model: str = MODELS[0], length: int = 1024) -> HTML:
    """The step of full fine-tuning above that of each variant, to drag through, and the line of what the GPU has."""
    return HTML(scrubber([predict(recipe, gpu) for recipe in _recipes(model, variants, length)]))


def _recipes(model: str, variants: Sequence[Variant], length: int) -> list[Recipe]:
    alone = Recipe(model=model, effective_batch_size=8, sequence_length=length)
    return [alone, *(reduce(or_, v if isinstance(v, tuple) else (v,), alone) for v in variants)]


def _row(recipe: Recipe, cards: Sequence[Gpu]) -> dict[str, str]:
    row: dict[str, str] = {"model": recipe.model, "recipe": recipe.label}
    told: dict[str, str] = {}
    found = None
    for card in cards:
        found = _answer(recipe, card, found)
        row[f"{card.title}, {format_bytes(card.memory_bytes)}"] = _verdict(found)
        told = told or (_told(found) if isinstance(found, Prediction) else {})
    return row | told


def _answer(recipe: Recipe, card: Gpu, known: Prediction | WorkbenchError | None) -> Prediction | WorkbenchError:
    """The prediction for a card: what is known for another, if that allocates the same and decides."""
    if isinstance(known, Prediction) and GPUS[known.gpu].cublas_workspace_bytes == card.cublas_workspace_bytes:
        room = card.memory_bytes - card.context_bytes_estimate
        if not known.peak_allocated_bytes <= room < (known.peak_reserved_bytes or 0):
            return replace(known, capacity_bytes=card.memory_bytes, context_bytes=card.context_bytes_estimate)
    return predict_all(recipe, [card.name])[0]


def _verdict(answer: Prediction | WorkbenchError) -> str:
    if isinstance(answer, WorkbenchError):
        return str(answer)
    room = (answer.capacity_bytes or 0) - answer.context_bytes - (answer.peak_reserved_bytes or 0)
    return f"✓ {format_bytes(room)} left" if answer.fits else f"✗ {format_bytes(-room)} over"


def _told(found: Prediction) -> dict[str, str]:
    largest = max(Category, key=lambda category: found.by_category[category])
    return {
        "peak": format_bytes(found.peak_allocated_bytes),
        "reserved": format_bytes(found.peak_reserved_bytes or 0),
        "unattributed": format_bytes(found.by_category[Category.UNATTRIBUTED]),
        "most of the peak": f"{largest.replace('_', ' ')}, {format_bytes(found.by_category[largest])}",
        "it comes in the": f"{found.peak_phase.replace('_', ' ')} phase: {in_words(found.peak_operation)}",
        "by": f"the {GPUS[found.gpu].title}'s kernels by {engine_words(found.source)}",
    }
