"""The gate: it refuses a recipe, or turns it into a job.

    job = prepare(Recipe(model="gpt2-tiny", steps=3), World.find("cpu"))

Whatever can be refused is refused before weights are loaded, and whatever must be made is made once. Those who execute
a job, predict its memory or write it out as a script read it, and check nothing again. One check is left to them, that
of the optimizer (`arguments.check_optimizer`): it takes the `TrainingArguments`, which are built where the device is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, TrainerCallback

from workbench.base.categories import format_bytes, parse_bytes
from workbench.base.device import NOT_COMPUTED, Device
from workbench.base.errors import ConfigurationError
from workbench.base.paths import runs_folder
from workbench.journal.record import Record
from workbench.models import belongs, gpt2, load
from workbench.models import source as models
from workbench.models.family import positions
from workbench.recipe import BALANCED, STRATEGY, Recipe
from workbench.techniques import REGISTRY, Capability
from workbench.techniques.base import Arguments
from workbench.texts import corpus
from workbench.training.arguments import EPOCHS, check_arguments, check_reports, complete_arguments
from workbench.training.trainer import make_callbacks, prepare_data
from workbench.training.world import World

# A tokenizer is judged by so many characters of the held-out text.
SAMPLE_CHARACTERS = 10_000
SAVE_FORMS = ("merged", "adapter")
# Why a model cannot be saved as merged weights, by what a technique brings: the end of a sentence that names it.
WHY_UNMERGEABLE = {
    Capability.VIRTUAL_TOKENS: "which no weights can stand for",
    Capability.QUANTIZED_WEIGHTS: "into which an adapter cannot be merged without rounding it to their few values",
}


@dataclass(frozen=True)
class Material:
    """The model and the text that a recipe names, as they were read: the model without its weights, the text in blocks.

    Attributes:
        source: where the model's weights are, or the config that new ones are made from.
        tokenizer: a `PreTrainedTokenizerBase`; None in a prediction, whose blocks are of any tokens.
        prompt: the beginning of the held-out text.
        text_sha256: the hash of the text; runs compare only if it is equal.
        remarks: sentences about the text, for the record.
        counts_unequally: whether the rows have unequally many tokens that count for the loss.
    """

    source: models.ModelSource
    config: PreTrainedConfig
    tokenizer: Any
    blocks: corpus.Blocks
    prompt: str = ""
    text_sha256: str = ""
    remarks: tuple[str, ...] = ()
    counts_unequally: bool = False


@dataclass(frozen=True)
class Job:
    """All that a run needs but the weights.

    Attributes:
        recipe: its model is a name by now, not `auto`, and its epochs are steps.
        data: the Trainer's `train_dataset`, `eval_dataset` and `data_collator`.
        arguments: the keyword arguments of `TrainingArguments`. The object is made where the device is.
        callbacks: for the Trainer.
        record: as it begins. Under its id the run is found, whoever executes the job.
        missing: what the recipe needs and this machine, or this device, does not have, with the cure; empty if it has
            everything.
        folder: where records go.
        save: whether to keep the fine-tuned model: as `"merged"` weights, or the `"adapter"` alone; None: not.
        sample_tokens: how many tokens continue the material's prompt, before and after; 0: no samples.
        resume: whether to go on with the unfinished run that this one would repeat, if there is one.
    """

    recipe: Recipe
    world: World
    material: Material
    data: dict[str, Any]
    arguments: Arguments
    callbacks: list[TrainerCallback]
    record: Record
    missing: str
    folder: Path
    save: str | None = None
    sample_tokens: int = 0
    resume: bool = False

    @property
    def device(self) -> Device:
        return self.world.device


def prepare(
    recipe: Recipe,
    world: World,
    *,
    material: Material | None = None,
    save: str | None = None,
    sample_tokens: int = 0,
    checkpoint_every: int | None = None,
    resume: bool = False,
    memory_cap: str | int | None = None,
    longest_first: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    folder: Path | None = None,
) -> Job:
    """Check a recipe, and make everything that its run needs but the weights.

    `auto` becomes the model for this device, epochs become steps, and conversations are evaluated one row at a time if
    nothing else is asked for.

    Args:
        world: the device it is for, on this machine or not, and the ranks that share it.
        material: model and text, instead of reading those that the recipe names. A prediction hands in rows of any
            tokens, and a model without weights, so that it downloads nothing.
        callbacks: for the Trainer, after those that the recipe names.
        folder: where records go; by default `data/runs`.

    The other arguments are those of `workbench.run`.

    Raises:
        ConfigurationError: something cannot be used; the message names the value and the cure.
        UnavailableError: the hub cannot be reached, or a program that the run reports to is not installed. What the
            device lacks is not raised but is `job.missing`, since such a run still leaves a record.
    """
    device = world.device
    cap_bytes = parse_memory_cap(memory_cap, device)
    check_saving(recipe, save)
    check_resuming(recipe, checkpoint_every, resume, longest_first)
    if longest_first and recipe.arguments.get(STRATEGY) == BALANCED:
        raise ConfigurationError(f"longest_first: {STRATEGY}={BALANCED!r} has its own order. Leave one of them out.")
    missing = why_not_on_device(recipe, device)
    check_arguments(recipe)
    check_reports(recipe)
    all_callbacks = [*make_callbacks(recipe), *callbacks]
    # The record names all of them: a run with another callback is another run.
    names = [f"{type(callback).__module__}:{type(callback).__name__}" for callback in callbacks]
    recipe = replace(recipe, callbacks=(*recipe.callbacks, *names))

    recipe = replace(recipe, model=models.resolve_auto(recipe.model, device.kind))
    material = material or read_material(recipe, sample_tokens)
    # An evaluation's loss is the mean over its batches. Where unequally many tokens count in the rows, it would depend
    # on how many rows a batch has.
    if material.counts_unequally and recipe.evaluation_batch_size is None:
        recipe = replace(recipe, evaluation_batch_size=1)
    data = prepare_data(recipe, material.blocks)
    if EPOCHS in recipe.arguments:
        recipe = replace(recipe, steps=steps_of_epochs(recipe, data["train_dataset"]))

    learning_rate = recipe.learning_rate or customary_learning_rate(recipe, material.config)
    arguments = complete_arguments(recipe, learning_rate)
    if checkpoint_every is not None:
        arguments |= {"save_strategy": "steps", "save_steps": checkpoint_every}
    remarks = list(material.remarks)
    if device.emulated_gpu:  # there are no losses to report, nor texts to sample
        remarks.insert(0, NOT_COMPUTED)
        arguments["report_to"] = "none"
        sample_tokens = 0

    # The record begins here, so that whoever has the job can end it, even if the process is killed.
    record = Record.start(
        recipe,
        model=recipe.model,
        data_sha256=material.text_sha256,
        learning_rate=learning_rate,
        memory_cap_bytes=cap_bytes,
        longest_first=longest_first,
        warnings=list(dict.fromkeys(remarks)),
        **world.facts(),
    )
    return Job(
        recipe=recipe,
        world=world,
        material=material,
        data=data,
        arguments=arguments,
        callbacks=all_callbacks,
        record=record,
        missing=missing,
        folder=folder or runs_folder(),
        save=save,
        sample_tokens=sample_tokens,
        resume=resume,
    )


def read_material(recipe: Recipe, sample_tokens: int = 0) -> Material:
    """Find the model that a recipe names, read its text, and cut that into blocks.

    Raises:
        ConfigurationError: text, model, length or batch cannot be used, or the sample would be too long.
        UnavailableError: the hub cannot be reached.
    """
    text = corpus.load_corpus(recipe.corpus)
    source = models.locate(recipe.model)
    with load.quiet():
        config = load.load_config(source)
        tokenizer = load.load_tokenizer(source)
    load.check_trainable(source, config)
    check_model(recipe, source, config)
    belongs.check_vocabulary(source, config, tokenizer)
    tokenizer_remarks = belongs.check_tokenizer(source, config, tokenizer, text.held_out[:SAMPLE_CHARACTERS])
    prompt = corpus.prompt(text)
    if sample_tokens:
        tokens = len(tokenizer(prompt)["input_ids"]) + sum(positions_taken(recipe).values())
        models.check_sample(source, config, tokens, sample_tokens)
    corpus.check_in_memory(text, techniques_with_examples(recipe))
    blocks = corpus.make_blocks(text, tokenizer, recipe.sequence_length, recipe.effective_batch_size)
    return Material(
        source=source,
        config=config,
        tokenizer=tokenizer,
        blocks=blocks,
        prompt=prompt,
        text_sha256=text.sha256,
        remarks=(*tokenizer_remarks, *(f"corpus: {remark}" for remark in (*text.remarks, *blocks.remarks))),
        counts_unequally=bool(text.loss),
    )


def customary_learning_rate(recipe: Recipe, config: PreTrainedConfig) -> float:
    """Return the model's customary learning rate, times what each technique customarily needs.

    Where a technique changes the tokens of a step, the rate goes with their square root, the rule for Adam (Malladi et
    al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", arXiv 2205.10287).
    """
    factor = math.prod(technique.learning_rate_factor for technique in recipe.techniques)
    tokens = recipe.shape.sequences * recipe.shape.tokens
    share = tokens / (recipe.effective_batch_size * recipe.sequence_length)
    return gpt2.learning_rate(config) * factor * math.sqrt(share)


def steps_of_epochs(recipe: Recipe, rows: Any) -> int:
    """Return how many steps the epochs have that a recipe asks for.

    Raises:
        ConfigurationError: nobody knows how many examples there are, as of a stream.
    """
    if not hasattr(rows, "__len__"):
        raise ConfigurationError(f"arguments: {EPOCHS} needs examples to be counted, not a stream. Give steps instead.")
    # A technique may take several steps for one of the recipe's.
    one_step = replace(recipe, steps=1).shape
    rows_of_a_step = one_step.sequences * one_step.steps
    epochs: float = recipe.arguments[EPOCHS]
    return math.ceil(epochs * len(rows) / rows_of_a_step)


def positions_taken(recipe: Recipe) -> dict[str, int]:
    """Return how many of the model's positions each technique takes in every sequence, by its name."""
    return {technique.name: technique.positions for technique in recipe.techniques if technique.positions}


def check_model(recipe: Recipe, source: models.ModelSource, config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if a model has too few positions for the recipe, or does not suit a technique."""
    models.check_positions(source.name, positions(config), recipe.sequence_length, positions_taken(recipe))
    for technique in recipe.techniques:
        technique.check_config(config)


def techniques_with_examples(recipe: Recipe) -> list[str]:
    """Return the names of the techniques that cut the text into examples of their own."""
    return [technique.name for technique in recipe.techniques if technique.examples() is not None]


def check_saving(recipe: Recipe, save: str | None) -> None:
    """Raise ConfigurationError if there is no such form to save a model in, or the techniques do not allow it."""
    if save is None:
        return
    if save not in SAVE_FORMS:
        raise ConfigurationError(f"save must be one of {', '.join(SAVE_FORMS)} or None, got {save!r}.")
    has_adapter = any(Capability.ADAPTER in technique.brings for technique in recipe.techniques)
    if save == "adapter" and not has_adapter:
        adapters = ", ".join(name for name, kind in REGISTRY.items() if Capability.ADAPTER in kind.brings)
        raise ConfigurationError(f"save: this recipe trains no adapter. Save it as 'merged', or add {adapters}.")
    if save == "merged":
        for technique in recipe.techniques:
            for capability in technique.brings & WHY_UNMERGEABLE.keys():
                raise ConfigurationError(
                    f"save: {technique.name} brings {capability}, {WHY_UNMERGEABLE[capability]}. Save it as 'adapter'."
                )


def parse_memory_cap(memory_cap: str | int | None, device: Device) -> int | None:
    """Return the cap in bytes, or None if there is none.

    Raises:
        ConfigurationError: it is not an amount, or more than the device has.
    """
    if memory_cap is None:
        return None
    cap_bytes = parse_bytes(memory_cap, "memory_cap")
    if device.total_bytes is not None and cap_bytes > device.total_bytes:
        raise ConfigurationError(
            f"memory_cap: {memory_cap!r} is more than the {format_bytes(device.total_bytes)} of "
            "this GPU. Leave it out, or lower it."
        )
    return cap_bytes


def check_resuming(recipe: Recipe, checkpoint_every: int | None, resume: bool, longest_first: bool) -> None:
    """Raise ConfigurationError if the run could not write its checkpoints, or not go on from them."""
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ConfigurationError(f"checkpoint_every must be at least 1 step, got {checkpoint_every}.")
    if not resume and checkpoint_every is None:
        return
    if longest_first:
        raise ConfigurationError(
            "longest_first: it changes the order of the examples, which a resumed run could not go "
            "on with. Leave out resume and checkpoint_every, or longest_first once you know that "
            "it fits."
        )
    for technique in recipe.techniques:
        if not technique.can_be_resumed:
            raise ConfigurationError(
                f"checkpoint_every: {technique.name} keeps what training needs where a checkpoint "
                f"does not reach. Leave out resume and checkpoint_every, or {technique.name}."
            )


def why_not_on_device(recipe: Recipe, device: Device) -> str:
    """Say what a device lacks for the first technique that cannot run on it, with the cure; empty if all can run."""
    for technique in recipe.techniques:
        reason = technique.missing(device)
        if reason:
            return reason
    return ""
