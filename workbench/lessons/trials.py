"""What the clinic's cases need under the switches that a reader chooses: predicted, or run in small on this CPU.

A case of `clinic.toml` that has a recipe is predicted for its card. The others are functions here, in TRIALS.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import Any

from workbench.base.categories import Phase, format_bytes
from workbench.base.garbage import collect_garbage
from workbench.gpus.caching_allocator import MIB, CachingAllocator, OutOfCapacity
from workbench.lessons.cards import predict_known
from workbench.prediction.life import predict_life
from workbench.prediction.phases import Habits
from workbench.recipe import Recipe
from workbench.techniques import GradientCheckpointing, MixedPrecision, Padding, parse_technique

HOST_BYTES = 12_700_000_000  # of the machine around the card: a free Colab's
CUT = "cut at {} tokens"
OF_DDP = {"four GPUs", "divide the batch among the GPUs", "gradient_as_bucket_view=True"}


@dataclass(frozen=True)
class Tried:
    """What a case needs under some switches.

    Args:
        largest: the largest category at the peak, and its bytes.
        short: what else is missing, in words; it does not fit then, whatever the device has.
    """

    needed_bytes: int
    budget_bytes: int
    largest: tuple[str, int] = ("", 0)
    short: str = ""

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.budget_bytes and not self.short

    def __str__(self) -> str:
        text = f"needs {format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}"
        category, size = self.largest
        if category:
            text += f", most of it {category.replace('_', ' ')}: {format_bytes(size)}"
        return f"{text}; {self.short}" if self.short else text


Switches = Collection[str]
Trial = Callable[[Switches], Tried]


def predicted_on(recipe: Recipe, gpu: str) -> Trial:
    """A training step on a GPU, predicted."""

    def trial(switches: Switches) -> Tried:
        prediction = predict_known(changed(recipe, switches), gpu)
        largest = max(prediction.by_category.items(), key=itemgetter(1))
        return Tried(prediction.need_bytes, prediction.capacity_bytes or 0, largest)

    return trial


def changed(recipe: Recipe, switches: Switches) -> Recipe:
    """The recipe with techniques set, as on the command line (`lora=rank:4`), or dropped (`no lora`).

    Raises:
        ConfigurationError: a switch is neither, or they do not go together.
    """
    for switch in switches:
        name = switch.removeprefix("no ").partition("=")[0]
        techniques = [technique for technique in recipe.techniques if technique.name != name]
        if not switch.startswith("no "):
            techniques.append(parse_technique(switch))
        recipe = replace(recipe, techniques=tuple(techniques))
    return recipe


def of_file(settings: Mapping[str, Any]) -> Trial:
    """Of a case whose recipe and card stand in `clinic.toml`."""
    values = dict(settings)
    gpu = values.pop("gpu")
    techniques = values.pop("techniques", [])
    return predicted_on(changed(Recipe(**values), techniques), gpu)


# ---- the step ----


def each_gpu(switches: Switches) -> Tried:
    """One of several under DDP: its own rows of the batch, all of the model, and the buckets."""
    gpus = 4 if "four GPUs" in switches else 2
    batch = 4 // gpus if "divide the batch among the GPUs" in switches else 4
    large = Recipe(model="gpt2-large", effective_batch_size=batch, sequence_length=512)
    prediction = predict_known(changed(large, [switch for switch in switches if switch not in OF_DDP]), "t4")
    needed_bytes = prediction.need_bytes
    if "gradient_as_bucket_view=True" not in switches:
        needed_bytes += prediction.maximum_by_category["gradients"]
    return Tried(needed_bytes, prediction.capacity_bytes or 0)


def long_batch(switches: Switches) -> Tried:
    """Padded speeches, cut or not; the prediction takes the batch with the longest."""
    speeches = Recipe(model="gpt2", effective_batch_size=32, sequence_length=1024) | Padding()
    others = list(switches)
    for length in (128, 256):
        if CUT.format(length) in switches:
            others.remove(CUT.format(length))
            speeches = replace(speeches, sequence_length=length)
    return predicted_on(speeches, "t4")(others)


# ---- the rest of a run's life ----


def evaluation(switches: Switches) -> Tried:
    """With other habits, which have the Trainer's own names, or other batches of the evaluation."""
    chosen = {"prediction_loss_only": "false", "held_out_rows": "64", "evaluation_batch_size": "32"}
    chosen |= dict(switch.split("=") for switch in switches)
    at_once = int(chosen.pop("evaluation_batch_size"))
    habits = Habits.parse(",".join(f"{name}:{value}" for name, value in chosen.items()))
    plain = Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024, evaluation_batch_size=at_once)
    life = predict_life(plain | GradientCheckpointing() | MixedPrecision(dtype="fp16"), "t4", habits)
    on_host = max(peak.host_bytes for peak in life.peaks)
    short = []
    if life.refused:
        short.append(f"refused: {', '.join(life.refused)}")
    if on_host > HOST_BYTES:
        short.append(f"the host would hold {format_bytes(on_host)} of {format_bytes(HOST_BYTES)}")
    return Tried(life.highest.device_bytes + life.context_bytes, life.capacity_bytes or 0, short="; ".join(short))


# ---- loops of one's own, with the embedded model; the cards are as small as that ----


@cache
def tiny() -> Any:
    return Recipe(model="gpt2-tiny").load().train()


@cache
def weights_bytes() -> int:
    return sum(parameter.nbytes for parameter in tiny().parameters())


def measured(loop: Callable[[Switches], None], switches: Switches, weights: float) -> Tried:
    """The peak of a loop, on a card that has so many times the weights."""
    from workbench.measure.meter import Meter

    with Meter(tiny()) as meter, meter.phase(Phase.FORWARD):
        loop(switches)
    tiny().train()
    return Tried(meter.report().peak_allocated_bytes, int(weights * weights_bytes()))


def graph_is_kept(switches: Switches) -> Any:
    """The context of a loop, which may have switched its graph off."""
    import torch

    if "model.eval()" in switches:
        tiny().eval()
    return torch.set_grad_enabled("torch.no_grad()" not in switches)


def scores(switches: Switches) -> Tried:
    return measured(_scores, switches, 3.5)


def _scores(switches: Switches) -> None:
    import torch

    losses = []
    guesses = []
    with graph_is_kept(switches):
        for _ in range(8):
            batch = torch.zeros(4, 64, dtype=torch.long)
            out = tiny()(input_ids=batch, labels=batch, use_cache=False)
            losses.append(out.loss.item() if "losses.append(loss.item())" in switches else out.loss)
            only_best = "guesses.append(logits.argmax(-1))" in switches
            guesses.append(out.logits.argmax(-1) if only_best else out.logits)
            if "del batch" in switches:
                del batch


def generation(switches: Switches) -> Tried:
    return measured(_generation, switches, 2.5)


def _generation(switches: Switches) -> None:
    import torch

    at_once = 2 if "two prompts at a time" in switches else 4
    with graph_is_kept(switches):
        for prompts in torch.zeros(4, 256, dtype=torch.long).split(at_once):
            ids = prompts
            kept = None
            for _ in range(8):
                new = ids if kept is None else ids[:, -1:]
                out = tiny()(input_ids=new, past_key_values=kept, use_cache="use_cache=False" not in switches)
                kept = out.past_key_values
                ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
            if "del out, cache" in switches:
                del out, kept


def second_cell(switches: Switches) -> Tried:
    """What a first attempt leaves behind, and what a second one needs beside it. Python keeps the exception as IPython
    does."""
    from workbench.advise.leaks import release
    from workbench.measure.allocators import live_tensor_bytes

    before = live_tensor_bytes("cpu")
    notebook: dict[str, Any] = {}
    first = 0
    try:
        _attempt(notebook)
    except RuntimeError as trouble:
        sys.last_value = trouble
        first = trouble.args[1] - before
    if "release()" in switches:
        release()
    if "del model" in switches:
        del notebook["model"]
    if "gc.collect()" in switches:
        collect_garbage()
    left = live_tensor_bytes("cpu") - before
    again = (first + weights_bytes()) // 2 if "half the batch" in switches else first  # the weights are not halved
    notebook.clear()
    release()
    return Tried(left + again, int(1.1 * first))


def _attempt(notebook: dict[str, Any]) -> None:
    import torch

    from workbench.measure.allocators import live_tensor_bytes

    model = notebook["model"] = Recipe(model="gpt2-tiny").load().train()
    ids = torch.zeros(4, 64, dtype=torch.long)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    needed = live_tensor_bytes("cpu")
    raise RuntimeError("out of memory, let us say", needed, out)


def snapshots(switches: Switches) -> Tried:
    """Of weights and optimizer in host memory, which has room for twice the weights."""
    import torch

    from workbench.measure.allocators import live_tensor_bytes

    parameters = list(tiny().parameters())
    before = live_tensor_bytes("cpu")
    dtype = torch.float16 if "in half precision" in switches else torch.float32
    copies = 1 if "weights without optimizer states" in switches else 3  # AdamW keeps two numbers for each weight
    kept: list[Any] = []
    for _ in range(5):
        if "keep the last one only" in switches:
            kept.clear()
        snapshot = []
        for parameter in parameters * copies:
            snapshot.append(parameter.detach().to(dtype, copy=True))
        kept.append(snapshot)
    return Tried(live_tensor_bytes("cpu") - before, 2 * weights_bytes())


# ---- the allocator ----


def gaps(switches: Switches) -> Tried:
    """After three steps something large is wanted, of a card of 1000 MiB."""
    card = _after_training(switches)
    large = 740 * MIB
    needed_bytes = card.allocated_bytes + large
    short = ""
    try:
        card.malloc(large)
    except OutOfCapacity:
        short = f"refused: {format_bytes(card.reserved_bytes)} are in segments that cannot go back"
    return Tried(needed_bytes, 1000 * MIB, short=short)


def _after_training(switches: Switches) -> CachingAllocator:
    """Six layers, batches of three lengths; each layer leaves a small result, the first step the optimizer's states."""
    card = CachingAllocator(1000 * MIB, expandable_segments="expandable_segments:True" in switches)
    for step, length in enumerate((88, 96, 100)):
        wanted = (100 if "pad to one length" in switches else length) * MIB
        layers = []
        for _ in range(6):
            layers.append(card.malloc(wanted // (2 if "half the batch" in switches else 1)))
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


TRIALS: dict[str, Trial] = {
    "two_gpus": each_gpu,
    "long_batch": long_batch,
    "evaluation": evaluation,
    "scores": scores,
    "generation": generation,
    "second_cell": second_cell,
    "snapshots": snapshots,
    "gaps": gaps,
}
