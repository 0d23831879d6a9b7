"""A job: a recipe that has passed every check that can be made before weights are loaded, and what they had to read."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.errors import ConfigurationError
from workbench.measure.allocators import total_bytes
from workbench.measure.categories import format_bytes, parse_bytes
from workbench.models import source as models
from workbench.models.gpt2 import learning_rate
from workbench.models.load import check_trainable, load_config, load_tokenizer, quiet
from workbench.recipe import Recipe
from workbench.run.trainer import EPOCHS, prepare_data, training_arguments
from workbench.techniques import REGISTRY, Capability
from workbench.texts import corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAVE_FORMS = ("merged", "adapter")
UNMERGEABLE = {
    Capability.VIRTUAL_TOKENS: "which no weights can stand for",
    Capability.QUANTIZED_WEIGHTS: "into which an adapter cannot be merged without rounding it to their few values",
}


@dataclass(frozen=True)
class Job:
    """A recipe that has passed every check, with what the checks had to read anyway."""

    recipe: Recipe
    device: torch.device
    source: models.ModelSource
    config: Any
    tokenizer: "PreTrainedTokenizerBase"
    text: corpus.Corpus
    blocks: corpus.Blocks

    @property
    def learning_rate(self) -> float:
        """As asked, or the model's customary one times what each technique customarily needs.

        Where a technique changes the tokens of a step, the rate goes with their square root, the rule for Adam
        (Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv 2205.10287).
        """
        recipe, shape = self.recipe, self.recipe.shape
        share = shape.sequences * shape.tokens / (recipe.effective_batch_size * recipe.sequence_length)
        factor = math.prod(technique.learning_rate_factor for technique in recipe.techniques) * math.sqrt(share)
        return recipe.learning_rate or learning_rate(self.config) * factor


def prepare(recipe: Recipe, device: torch.device, sample_tokens: int = 0) -> Job:
    """Read the text, find the model, and cut the text into blocks; `auto` becomes the model for this device, epochs
    become steps, and conversations are evaluated one row at a time if nothing else is asked for.

    Raises:
        ConfigurationError: arguments, text, model, length or batch cannot be used, or the sample would be too long.
        UnavailableError: the hub cannot be reached.
    """
    training_arguments(recipe, 1.0, device, Path())  # or they would be refused when the model is there
    recipe = replace(recipe, model=models.resolve_auto(recipe.model, device.type))
    text = corpus.load_corpus(recipe.corpus)
    source = models.locate(recipe.model)
    with quiet():
        config, tokenizer = load_config(source), load_tokenizer(source)
    taken = {t.name: t.positions for t in recipe.techniques if t.positions}
    check_trainable(source, config)
    models.check_length(source, config, recipe.sequence_length, taken)
    for technique in recipe.techniques:
        technique.check_config(config)
    models.check_vocabulary(source, config, tokenizer)
    prompt = tokenizer(corpus.prompt(text))["input_ids"] if sample_tokens else []
    models.check_sample(source, config, len(prompt) + sum(taken.values()), sample_tokens)
    corpus.check_in_memory(text, own_examples(recipe))
    # the mean over rows in which unequally many tokens count is another for other batches of them
    recipe = replace(recipe, evaluation_batch_size=recipe.evaluation_batch_size or (1 if text.loss else None))
    blocks = corpus.make_blocks(text, tokenizer, recipe.sequence_length, recipe.effective_batch_size)
    if (epochs := recipe.arguments.get(EPOCHS)) is not None:
        recipe = replace(recipe, steps=_steps(recipe, blocks, epochs))
    return Job(recipe, device, source, config, tokenizer, text, blocks)


def _steps(recipe: Recipe, blocks: corpus.Blocks, epochs: float) -> int:
    """Of so many epochs. Raises ConfigurationError: nobody knows how many examples there are."""
    rows, one = prepare_data(recipe, blocks)["train_dataset"], replace(recipe, steps=1).shape
    if not hasattr(rows, "__len__"):
        raise ConfigurationError(f"arguments: {EPOCHS} needs examples to be counted, not a stream. Give steps instead.")
    return math.ceil(epochs * len(rows) / (one.sequences * one.steps))


def own_examples(recipe: Recipe) -> list[str]:
    """Names of the techniques that cut the text into examples of their own."""
    return [technique.name for technique in recipe.techniques if technique.examples() is not None]


def check_saving(recipe: Recipe, save: str | None) -> None:
    """Raises ConfigurationError if the run could not save in the end what is asked of it."""
    if save not in (None, *SAVE_FORMS):
        raise ConfigurationError(f"save must be one of {', '.join(SAVE_FORMS)} or None, got {save!r}.")
    if save == "adapter" and not any(Capability.ADAPTER in t.brings for t in recipe.techniques):
        adapters = ", ".join(name for name, t in REGISTRY.items() if Capability.ADAPTER in t.brings)
        raise ConfigurationError(f"save: this recipe trains no adapter. Save it as 'merged', or add {adapters}.")
    for technique in recipe.techniques if save == "merged" else ():
        for capability in technique.brings & UNMERGEABLE.keys():
            raise ConfigurationError(
                f"save: {technique.name} brings {capability}, {UNMERGEABLE[capability]}. Save it as 'adapter'."
            )


def memory_cap_bytes(memory_cap: str | int | None, device: torch.device) -> int | None:
    """The cap in bytes. Raises ConfigurationError if it is not an amount, or more than the device has."""
    if memory_cap is None:
        return None
    cap, total = parse_bytes(memory_cap, "memory_cap"), total_bytes(device)
    if total is not None and cap > total:
        raise ConfigurationError(
            f"memory_cap: {memory_cap!r} is more than the {format_bytes(total)} of this GPU. Leave it out, or lower it."
        )
    return cap


def check_resuming(recipe: Recipe, checkpoint_every: int | None, resume: bool, longest_first: bool) -> None:
    """Raises ConfigurationError if a run could not write the checkpoints asked of it, or not go on from them."""
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ConfigurationError(f"checkpoint_every must be at least 1 step, got {checkpoint_every}.")
    if not resume and checkpoint_every is None:
        return
    if longest_first:
        raise ConfigurationError(
            "longest_first: it changes the order of the examples, which a resumed run could not go on with. Leave out "
            "resume and checkpoint_every, or longest_first once you know that it fits."
        )
    for technique in recipe.techniques:
        if not technique.can_be_resumed:
            raise ConfigurationError(
                f"checkpoint_every: {technique.name} keeps what training needs where a checkpoint does not reach. "
                f"Leave out resume and checkpoint_every, or {technique.name}."
            )


def why_not_here(recipe: Recipe, device: torch.device) -> str:
    """What a technique needs and this machine has not, a device or a package, with the cure; empty if there is all."""
    return next(filter(None, (technique.missing(device.type) for technique in recipe.techniques)), "")
