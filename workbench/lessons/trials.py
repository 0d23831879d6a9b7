"""Trials of the clinic's cases under the switches that a reader chooses: predicted, or run in small on this CPU.

A case of `clinic.toml` that has a recipe is predicted for its card. The others are functions of this file, in TRIALS.
"""

import re
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from workbench.base.categories import Phase, format_bytes
from workbench.base.garbage import collect_garbage
from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity
from workbench.gpus.catalogue import MIB
from workbench.lessons.cards import predict_known
from workbench.recipe import Recipe
from workbench.techniques import parse_technique

CUT = re.compile(r"cut at (\d+) tokens")


@dataclass(frozen=True)
class Outcome:
    """The need of a case under some switches.

    Args:
        largest: the largest category at the peak; empty: the case has no categories.
        short: what else is missing, in words; then the case does not fit, whatever the device has.
    """

    needed_bytes: int
    budget_bytes: int
    largest: str = ""
    largest_bytes: int = 0
    short: str = ""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes and not self.short

    @property
    def need(self) -> str:
        text = f"needs {format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}"
        if self.short:
            text += f"; {self.short}"
        return text

    def __str__(self) -> str:
        if not self.largest:
            return self.need
        return f"{self.need}, most of it {self.largest.replace('_', ' ')}: {format_bytes(self.largest_bytes)}"


Switches = Collection[str]
Trial = Callable[[Switches], Outcome]


def prediction_trial(recipe: Recipe, gpu: str) -> Trial:
    """Return the trial of a recipe: its training step on a GPU, predicted."""

    def trial(switches: Switches) -> Outcome:
        prediction = predict_known(apply_switches(recipe, switches), gpu)
        sizes = prediction.by_category
        largest = max(sizes, key=sizes.__getitem__)
        return Outcome(prediction.need_bytes, prediction.capacity_bytes or 0, largest, sizes[largest])

    return trial


def apply_switches(recipe: Recipe, switches: Switches) -> Recipe:
    """Return the recipe with its switches applied.

    A switch sets a technique, as on the command line (`lora=rank:4`), drops one (`no lora`), or cuts the texts (`cut at
    128 tokens`).

    Raises:
        ConfigurationError: a switch is none of these, or they do not go together.
    """
    for switch in switches:
        cut = CUT.fullmatch(switch)
        if cut:
            recipe = replace(recipe, sequence_length=int(cut[1]))
            continue
        name = switch.removeprefix("no ").partition("=")[0]
        techniques = [technique for technique in recipe.techniques if technique.name != name]
        if not switch.startswith("no "):
            techniques.append(parse_technique(switch))
        recipe = replace(recipe, techniques=tuple(techniques))
    return recipe


# ---- a loop of one's own, with the embedded model, on cards that are as small as it is ----


def scores(switches: Switches) -> Outcome:
    """Evaluate eight batches, on a card that has 3.5 times the weights."""
    import torch

    from workbench.measure.meter import Meter

    model = Recipe(model="gpt2-tiny").load().train("model.eval()" not in switches)
    losses = []
    guesses = []
    with torch.set_grad_enabled("torch.no_grad()" not in switches), Meter(model) as meter, meter.phase(Phase.FORWARD):
        for _ in range(8):
            batch = torch.zeros(4, 64, dtype=torch.long)
            out = model(input_ids=batch, labels=batch, use_cache=False)
            loss = out.loss
            logits = out.logits
            if "losses.append(loss.item())" in switches:
                loss = loss.item()
            if "guesses.append(logits.argmax(-1))" in switches:
                logits = logits.argmax(-1)
            losses.append(loss)
            guesses.append(logits)
            if "del batch" in switches:
                del batch
    return Outcome(meter.report().peak_allocated_bytes, int(3.5 * weights_bytes(model)))


def weights_bytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def second_cell(switches: Switches) -> Outcome:
    """Let a cell fail, and add what it leaves behind to what the next attempt needs.

    The exception is kept in `sys.last_value`, as IPython keeps it.
    """
    from workbench.advise.leaks import release
    from workbench.measure.allocators import live_tensor_bytes

    before = live_tensor_bytes("cpu")
    notebook = {"model": Recipe(model="gpt2-tiny").load().train()}
    try:
        _attempt(notebook["model"])
    except RuntimeError as trouble:
        sys.last_value = trouble
    first = live_tensor_bytes("cpu") - before
    weights = weights_bytes(notebook["model"])
    if "release()" in switches:
        release()
    if "del model" in switches:
        del notebook["model"]
    if "gc.collect()" in switches:
        collect_garbage()
    left = live_tensor_bytes("cpu") - before
    # half the batch halves all but the weights
    again = (first + weights) // 2 if "half the batch" in switches else first
    notebook.clear()
    release()
    return Outcome(left + again, int(1.1 * first))


def _attempt(model: Any) -> None:
    import torch

    ids = torch.zeros(4, 64, dtype=torch.long)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    raise RuntimeError("out of memory, let us say", out)


# ---- the allocator ----


def gaps(switches: Switches) -> Outcome:
    """Ask a card of 1000 MiB for a large block after three steps of a training."""
    card = _after_training(switches)
    large = 740 * MIB
    needed_bytes = card.allocated_bytes + large
    short = ""
    try:
        card.malloc(large)
    except OutOfCapacity:
        short = f"refused: {format_bytes(card.reserved_bytes)} are in segments that cannot go back"
    return Outcome(needed_bytes, 1000 * MIB, short=short)


def _after_training(switches: Switches) -> CachingAllocator:
    """Return the allocator after three steps of six layers, with batches of three lengths.

    Each layer leaves a small result, and the first step leaves the optimizer's states.
    """
    card = CachingAllocator(1000 * MIB, expandable_segments="expandable_segments:True" in switches)
    for step, length in enumerate((88, 96, 100)):
        wanted = MIB * (100 if "pad to one length" in switches else length)
        if "half the batch" in switches:
            wanted //= 2
        layers = []
        for _ in range(6):
            layers.append(card.malloc(wanted))
            if "results to the host" not in switches:
                card.malloc(4 * MIB)
        for block in layers:
            card.free(block)
        if step == 0:
            for _ in range(6):
                card.malloc(30 * MIB)
        if "empty_cache() after each step" in switches:
            card.empty_cache()
    return card


TRIALS: dict[str, Trial] = {trial.__name__: trial for trial in (scores, second_cell, gaps)}
