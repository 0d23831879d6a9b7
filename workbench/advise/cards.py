"""Would a second card help? One rank of two that share a recipe (FSDP2), predicted, against one card's budget."""

from dataclasses import replace

from workbench.advise.candidate import Candidate
from workbench.errors import ConfigurationError
from workbench.measure.categories import Category, format_bytes
from workbench.predict import predict as prediction
from workbench.recipe import Recipe

CARDS, SHARD = 2, "full"
KEPT = (Category.ACTIVATIONS, Category.LOGITS_AND_LOSS)  # of its own batch, which no rank sheds


def on_two_cards(recipe: Recipe, gpu: str, budget_bytes: int) -> tuple[Candidate, ...]:
    """A rank of the recipe on two cards: with the same sequences a step, which halves its batch; and with the batch
    that one card has now, twice as many a step. What cannot be shared or predicted is not among them."""
    found = []
    for size in (recipe.effective_batch_size, CARDS * recipe.effective_batch_size):
        try:
            shared = replace(recipe, effective_batch_size=size)
            predicted = prediction.predict(shared, gpu, ranks=CARDS, shard=SHARD)
        except ConfigurationError:
            continue
        found.append(Candidate(shared, (), predicted, budget_bytes, None, f"--ranks {CARDS} --shard {SHARD}"))
    return tuple(found)


def cards_text(found: tuple[Candidate, ...]) -> list[str]:
    """Both answers in lines; of one that does not fit, what sharding cannot make smaller."""
    head = ["", f"On {CARDS} such cards, sharded (FSDP2), a rank of"] if found else []
    return head + [line for candidate in found for line in _lines(candidate)]


def _lines(candidate: Candidate) -> list[str]:
    p, room = candidate.predicted, format_bytes(abs(candidate.headroom_bytes))
    words = (
        f"   {candidate.recipe.effective_batch_size} sequences a step, {p.micro_batch_size} at a time on each card: "
        f"needs {format_bytes(candidate.needed_bytes)}, {room} {'to spare' if candidate.fits else 'too much'}"
    )
    if candidate.fits:
        return [words, f"      {candidate.command}"]
    kept, whole = sum(p.by_category.get(category, 0) for category in KEPT), p.peak_allocated_bytes
    why = "at its peak are activations and logits: no rank sheds them"
    return [words, f"      {format_bytes(kept)} of the {format_bytes(whole)} {why}"]
