"""A lesson's techniques on GPUs that people have: GPT-2 124M and XL, predicted without a GPU."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from IPython.display import HTML

from workbench.base.categories import format_bytes
from workbench.base.errors import WorkbenchError
from workbench.gpus.catalogue import Gpu
from workbench.gpus.catalogue import gpu as find_gpu
from workbench.lessons.recipes import Variant, on_cards
from workbench.lessons.timeline import scrubber
from workbench.prediction.committed import known_predictions
from workbench.prediction.predict import predict
from workbench.prediction.prediction import Prediction, PredictionOrError
from workbench.recipe import Recipe
from workbench.techniques.registry import in_words

CARDS = ("t4", "rtx3090")
MODELS = ("gpt2", "gpt2-xl")


def cards(
    *variants: Variant,
    gpus: Sequence[str] = CARDS,
    models: Sequence[str] = MODELS,
    length: int = 1024,
) -> pd.DataFrame:
    """Predict full fine-tuning with 8 × `length` tokens a step, and each variant: the bytes it needs, where it fits.

    `peak` is the bytes of the tensors, `reserved` those that PyTorch's allocator takes for them; both are predicted for
    the first card that can run the recipe, and the name of the column `peak` has the engine of the predictions. Below
    each card stand the bytes that it has left beside those reserved *there* and CUDA's context, or those that it lacks:
    the difference of two such cells is a saving. A card that cannot run a recipe has the reason in its place.
    """
    catalogue = list(map(find_gpu, gpus))
    rows = []
    engines = set()
    for model in models:
        for recipe in on_cards(model, variants, length):
            answers = known_predictions(recipe, gpus)
            rows.append(_row(recipe, catalogue, answers))
            for answer in answers:
                if isinstance(answer, Prediction):
                    engines.add(answer.source.partition(":")[0])
    peak = f"peak, {' or '.join(sorted(engines)) or 'predicted'}"
    table = pd.DataFrame(rows).rename(columns={"peak": peak})
    return table.set_index(["model", "recipe"]).rename_axis([None, None])


def step_on_card(*variants: Variant, gpu: str = CARDS[0], length: int = 1024) -> HTML:
    """Show the step of full fine-tuning of GPT-2 124M above that of each variant, to drag through.

    A line shows the memory that the card has.
    """
    steps = []
    for recipe in on_cards(MODELS[0], variants, length):
        steps.append(predict_known(recipe, gpu, timeline=True))
    return HTML(scrubber(steps))


def predict_known(recipe: Recipe, gpu: str = CARDS[0], *, timeline: bool = False, **several: Any) -> Prediction:
    """Predict as `workbench.predict` does; a prediction that comes with the workbench is there at once.

    Args:
        timeline: whether the prediction must have the timeline of its step, which few of those that come along have.
        several: `ranks` and `shard` of `workbench.predict`, for one of several cards; those are always predicted.
    """
    if several:
        return predict(recipe, gpu, **several)
    (answer,) = known_predictions(recipe, [gpu], timeline=timeline)
    if isinstance(answer, WorkbenchError):
        raise answer
    return answer


def _row(recipe: Recipe, catalogue: Sequence[Gpu], answers: Sequence[PredictionOrError]) -> dict[str, str]:
    row = {"model": recipe.model, "recipe": in_words(recipe.label), "peak": "–", "reserved": "–"}
    for card, answer in zip(catalogue, answers, strict=True):
        if row["peak"] == "–" and isinstance(answer, Prediction):  # the first card that can run it
            row["peak"] = format_bytes(answer.peak_allocated_bytes)
            row["reserved"] = format_bytes(answer.peak_reserved_bytes or answer.peak_allocated_bytes)
        row[f"{card.title}, {format_bytes(card.memory_bytes)}"] = _verdict(answer)
    return row


def _verdict(answer: PredictionOrError) -> str:
    if isinstance(answer, WorkbenchError):
        return str(answer).removeprefix("predict: ")
    left = (answer.capacity_bytes or 0) - answer.need_bytes
    if answer.fits:
        return f"✓ {format_bytes(left)} left"
    return f"✗ {format_bytes(-left)} over"
