"""What a lesson teaches, on cards that people have: GPT-2 124M and XL, predicted without a GPU."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from IPython.display import HTML

from workbench.base.categories import Category, format_bytes
from workbench.base.errors import WorkbenchError
from workbench.gpus.catalogue import GPUS, Gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.lessons.timeline import in_words, scrubber
from workbench.prediction.predict import predict, predict_all
from workbench.prediction.prediction import Prediction, engine_words
from workbench.recipe import Recipe
from workbench.techniques.base import Technique

CARDS = ("t4", "rtx3090")
MODELS = ("gpt2", "gpt2-xl")
PREDICTED_BY = "predicted by"  # of a row, for the caption
Variant = Technique | tuple[Technique, ...]  # one technique, or several together


def on_real_cards(
    *variants: Variant,
    gpus: Sequence[str] = CARDS,
    models: Sequence[str] = MODELS,
    length: int = 1024,
) -> Any:
    """A table: full fine-tuning with 8 × `length` tokens a step, then each variant; its peak, and on which GPU it fits.

    A GPU that cannot run a recipe has the reason in its place. The peak is that of the first GPU that can.
    """
    cards = [find_gpu(name) for name in gpus]
    rows = [_row(recipe, cards) for model in models for recipe in _recipes(model, variants, length)]
    predicted_by = " and ".join(sorted({row.pop(PREDICTED_BY) for row in rows if PREDICTED_BY in row}))
    table = pd.DataFrame(rows).set_index(["model", "recipe"]).rename_axis([None, None])
    table = table.replace(r"(?<=\d) (?=\S*B\b)", "\xa0", regex=True)  # a number stays with its unit
    styler = table.style.format(escape="html", na_rep="–").format_index(escape="html", axis=0)
    return styler.set_caption(
        f"8 × {length:,} tokens a step; fp32 and AdamW where nothing else is said. What is left is free beside CUDA's "
        f"context and the bytes reserved. Predicted, not measured, with {predicted_by}."
    )


def step_on_card(*variants: Variant, gpu: str = CARDS[0], model: str = MODELS[0], length: int = 1024) -> HTML:
    """The step of full fine-tuning above that of each variant, to drag through, and the line of what the GPU has."""
    return HTML(scrubber([predict(recipe, gpu) for recipe in _recipes(model, variants, length)]))


def _recipes(model: str, variants: Sequence[Variant], length: int) -> list[Recipe]:
    baseline = Recipe(model=model, effective_batch_size=8, sequence_length=length)
    recipes = [baseline]
    for variant in variants:
        techniques = variant if isinstance(variant, tuple) else (variant,)
        recipes.append(replace(baseline, techniques=techniques))
    return recipes


def _row(recipe: Recipe, cards: Sequence[Gpu]) -> dict[str, str]:
    answers = predict_all(recipe, [card.name for card in cards])
    row = {"model": recipe.model, "recipe": recipe.label}
    for card, answer in zip(cards, answers, strict=True):
        row[f"{card.title}, {format_bytes(card.memory_bytes)}"] = _verdict(answer)
    predictions = [answer for answer in answers if isinstance(answer, Prediction)]
    if predictions:
        row |= _peak(predictions[0])
    return row


def _verdict(answer: Prediction | WorkbenchError) -> str:
    if isinstance(answer, WorkbenchError):
        return str(answer)
    left = (answer.capacity_bytes or 0) - answer.need_bytes
    return f"✓ {format_bytes(left)} left" if answer.fits else f"✗ {format_bytes(-left)} over"


def _peak(prediction: Prediction) -> dict[str, str]:
    sizes = prediction.by_category
    largest = max(Category, key=sizes.__getitem__)
    phase = prediction.peak_phase.replace("_", " ")
    return {
        "peak": format_bytes(prediction.peak_allocated_bytes),
        "reserved": format_bytes(prediction.peak_reserved_bytes or 0),
        "unattributed": format_bytes(sizes[Category.UNATTRIBUTED]),
        "most of the peak": f"{largest.replace('_', ' ')}, {format_bytes(sizes[largest])}",
        "it comes in the": f"{phase} phase: {in_words(prediction.peak_operation)}",
        PREDICTED_BY: f"the {GPUS[prediction.gpu].title}'s kernels by {engine_words(prediction.source)}",
    }
