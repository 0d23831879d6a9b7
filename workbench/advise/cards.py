"""Would a second card help? One rank of two that share a recipe (FSDP2), predicted, against one card's budget."""

from contextlib import suppress
from dataclasses import replace

from workbench.advise.candidate import Candidate
from workbench.base.categories import Category, format_bytes
from workbench.base.errors import ConfigurationError
from workbench.prediction import predict as prediction
from workbench.recipe import Recipe

CARDS = 2
SHARD = "full"
KEPT = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)  # of its own batch, which no rank sheds


def on_two_cards(recipe: Recipe, gpu: str, budget_bytes: int) -> tuple[Candidate, ...]:
    """A rank of the recipe on two cards: with the same sequences a step, which halves its batch; and with the batch
    that one card has now, twice as many a step. What cannot be shared or predicted is not among them."""
    candidates = []
    options = f"--ranks {CARDS} --shard {SHARD}"
    for size in (recipe.effective_batch_size, CARDS * recipe.effective_batch_size):
        with suppress(ConfigurationError):
            shared = replace(recipe, effective_batch_size=size)
            predicted = prediction.predict(shared, gpu, ranks=CARDS, shard=SHARD)
            candidates.append(Candidate(shared, (), predicted, budget_bytes, options=options))
    return tuple(candidates)


def cards_text(candidates: tuple[Candidate, ...]) -> list[str]:
    """Both answers in lines; of one that does not fit, what sharding cannot make smaller."""
    lines = ["", f"On {CARDS} such cards, sharded (FSDP2), a rank of"] if candidates else []
    for candidate in candidates:
        predicted = candidate.predicted
        lines.append(
            f"   {candidate.recipe.effective_batch_size} sequences a step, {predicted.micro_batch_size} at a time on "
            f"each card: needs {format_bytes(candidate.needed_bytes)}, {candidate.room}"
        )
        if candidate.fits:
            lines.append(f"      {candidate.command}")
        else:
            kept = format_bytes(sum(predicted.by_category.get(category, 0) for category in KEPT))
            whole = format_bytes(predicted.peak_allocated_bytes)
            lines.append(f"      {kept} of the {whole} at its peak are activations and logits: no rank sheds them")
    return lines
