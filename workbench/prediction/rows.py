"""The rows, the model and the Trainer of a prediction.

A prediction needs no weights and no text: its model is a skeleton without memory, and its rows hold any tokens. Of a
large step only as many rows are made as give the same memory.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.measure.meter import Meter
from workbench.models.load import BUILD_ARGUMENTS, apply_to_config, load_config, load_tokenizer, quiet
from workbench.models.source import ModelSource, locate_config
from workbench.recipe import BALANCED, STRATEGY, Recipe
from workbench.texts import corpus
from workbench.texts.corpus import Blocks
from workbench.training.arguments import EPOCHS, build_training_arguments, check_optimizer, complete_arguments
from workbench.training.job import Job, Material, check_model, prepare, techniques_with_examples
from workbench.training.ranks.shards import Ranks, split_batch
from workbench.training.ranks.zero import trainer_of
from workbench.training.trainer import MeteredTrainer, build_trainer
from workbench.training.world import World

# Steps that a prediction takes: the first makes the optimizer's states, the second leaves the allocator's segments as
# all later steps find them, and the third shows what such a step needs.
STEPS = 3
# Micro-batches that are trained of each step, its last one among them: whatever comes after the second finds the memory
# that the second found.
MICRO_BATCHES = 3
# Micro-batches of a step that are fetched one by one. The inputs of all further ones are held as one tensor, which
# takes the same bytes.
FETCHED_MICRO_BATCHES = 256
# Tokens of a step that are made on the host. The inputs of a larger step exist on the device alone, where nobody reads
# them.
FETCHED_TOKENS = 2**18
# CUDA's attention kernels take at most so many sequences at once, which lie side by side in one grid: PyTorch's
# `attention.cu` refuses more.
MAX_SEQUENCES = 65_535
# Texts whose tokens are remembered from one prediction to the next.
REMEMBERED_TEXTS = 2**14
# Fields of a config that count the experts of a mixture of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Whole batches of an evaluation, beside a smaller last one: each after the second finds what the second left.
EVALUATION_BATCHES = 3

Batch = dict[str, torch.Tensor]


def count_fetched(recipe: Recipe, world_size: int = 1) -> tuple[int, int]:
    """Return how many sequences of a micro-batch, and how many micro-batches of a step, a rank makes on its host and
    moves to its device."""
    size, count = split_batch(recipe.training_arguments(), world_size)
    count = min(count, max(MICRO_BATCHES, FETCHED_MICRO_BATCHES // world_size))
    return min(size, max(1, FETCHED_TOKENS // (recipe.shape.tokens * count * world_size))), count


def blocks_for(
    recipe: Recipe,
    held_out: int | None = None,
    *,
    every: bool = False,
    ranks: Ranks | None = None,
) -> Blocks:
    """Return the blocks of tokens that a prediction trains on and evaluates. Which tokens they hold does not matter.

    Args:
        held_out: how many rows are evaluated; by default as many as `make_blocks` cuts from HELD_OUT_TOKENS.
        every: whether all batches of the evaluation are made, because the logits of each are kept. Otherwise
            EVALUATION_BATCHES whole ones and the smaller last one stand for all.
        ranks: the ranks that share the batch; None is a process alone.
    """
    length = recipe.sequence_length
    world_size = ranks.count if ranks else 1
    size, count = count_fetched(recipe, world_size)
    together: int = complete_arguments(recipe, 0.0)["per_device_eval_batch_size"]
    whole, rest = divmod(held_out or max(1, corpus.HELD_OUT_TOKENS // length), together)
    rows = max(size * count * world_size, min(recipe.effective_batch_size, FETCHED_TOKENS // length))
    if not every:
        whole = min(whole, EVALUATION_BATCHES)
    return Blocks(_dataset(STEPS * rows, length), _dataset(whole * together + rest, length), _text_to_cut(recipe))


def _dataset(rows: int, length: int) -> Dataset:
    return Dataset.from_dict({"input_ids": [list(range(length))] * rows})


def material_for(recipe: Recipe, blocks: Blocks) -> Material:
    """Return what a prediction trains in place of the recipe's weights and text. Only a config is downloaded.

    Raises ConfigurationError: the model cannot be used at all, at this length, or with one of the techniques.
    """
    source = locate_config(recipe.model)
    config = load_config(source)
    check_model(recipe, source, config)
    return Material(source=source, config=config, tokenizer=None, blocks=blocks)


def can_be_skeleton(config: PreTrainedConfig, arguments: dict[str, Any]) -> bool:
    """Whether `skeleton` can make the model: no argument acts while weights are loaded, as quantization does."""
    return not apply_to_config(config, arguments)[1].keys() - BUILD_ARGUMENTS


def skeleton(config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """Build the model on the meta device: its tensors have shapes and types, and no memory.

    Args:
        arguments: arguments of `from_pretrained`: `dtype`, `attn_implementation` and settings of the config.

    Raises:
        ConfigurationError: another argument is among them, and a prediction would miss its effect on loading.
    """
    config, arguments = apply_to_config(config, {"dtype": "float32", **arguments})
    missed = arguments.keys() - BUILD_ARGUMENTS
    if missed:
        raise ConfigurationError(
            f"predict: {min(missed)} acts while weights are loaded, "
            "which a prediction does not do. Measure this recipe with `run`, "
            "or give the technique that asks for it a `stand_in`."
        )
    with quiet(), torch.device("meta"), no_init_weights():
        model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config, **arguments)
    model.tie_weights()
    model.loss_type = "ForCausalLM"  # `load_model` sets the same
    return model


def replace_tensors(model: PreTrainedModel, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put another tensor in the place of every parameter and buffer, in the order in which `model.to` moves them.

    Tied tensors stay tied. What `make` returns takes the place even where `register_parameter` and `setattr` would
    refuse it.
    """

    others: dict[torch.Tensor, torch.Tensor] = {}

    def visit(module: torch.nn.Module) -> None:
        for tensors in cast("tuple[dict[str, torch.Tensor | None], ...]", (module._parameters, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in others:
                    other = make(tensor)
                    if other is not tensor and isinstance(tensor, torch.nn.Parameter):
                        other = torch.nn.Parameter(other, tensor.requires_grad)
                    others[tensor] = other
                    others[other] = other  # a module with two parents is visited twice
                tensors[name] = others[tensor]

    model.apply(visit)


def job_for(recipe: Recipe, device: Device, material: Material, ranks: Ranks | None = None) -> Job:
    """Send the recipe through the gate as a prediction, which reports to no program, calls no callback, and counts no
    epochs.

    Raises ConfigurationError: the gate refuses the recipe, or it asks for micro-batches of unequal numbers of rows.
    """
    if recipe.arguments.get(STRATEGY) == BALANCED:
        raise ConfigurationError(
            f"predict: {STRATEGY}={BALANCED!r} makes micro-batches of unequal numbers of rows, "
            "which a prediction does not know. Leave it out for an upper bound; "
            "`workbench scan FILE` says what it needs."
        )
    arguments = dict(recipe.arguments)
    for unused in ("report_to", EPOCHS):
        arguments.pop(unused, None)
    # The gate asks callbacks what they need. Those of transformers stay for that; others would have to be imported.
    callbacks = tuple(filter(re.compile(r"transformers\b").match, recipe.callbacks))
    world = World(device)
    if ranks:
        world = World(device, ranks.highest, ranks.count, ranks.shard)
    return prepare(replace(recipe, arguments=arguments, callbacks=callbacks), world, material=material)


def build_small_trainer(
    job: Job,
    model: Any,
    meter: Meter,
    device: torch.device,
    scratch: Path,
    callbacks: Any = (),
) -> tuple[MeteredTrainer, int]:
    """Build the Trainer of a prediction, which fetches no more than `count_fetched` says.

    Args:
        device: where the model's tensors are, real or fake; it plays the device of the job.

    Returns:
        The Trainer, and how many micro-batches a step of the recipe has on each rank.

    Raises:
        ConfigurationError: a micro-batch has more sequences than CUDA's kernels take.
    """
    world = job.world
    size, count = split_batch(job.arguments, world.world_size)
    if size > MAX_SEQUENCES:
        raise ConfigurationError(
            f"predict: CUDA's attention kernels take {MAX_SEQUENCES:,} sequences at once, "
            f"and this step has {size:,}. Lower effective_batch_size, "
            "or split it into micro-batches."
        )
    fetched = count_fetched(job.recipe, world.world_size)
    batches = {
        "per_device_train_batch_size": fetched[0],
        # The Trainer of a rank takes its part of the whole batch.
        "gradient_accumulation_steps": fetched[1] * world.world_size,
    }
    arguments = build_training_arguments(job.arguments | batches, device.type, scratch)
    check_optimizer(job.recipe, job.material.config, arguments, job.callbacks)
    trainer_kind: Callable[..., MeteredTrainer] = MeteredTrainer
    if world.shard:
        trainer_kind = trainer_of(world.shard)
    trainer = build_trainer(job.recipe, model, job.data, arguments, meter, [*callbacks], trainer_kind)
    if (size, count) != fetched:
        _enlarge(trainer, size, count)
    return trainer, count


def add_mask(collator: Callable[..., Batch], rows: Any) -> Batch:
    """Collate rows into a batch with a mask, (B, T): the one that the collator makes, or else all ones."""
    batch = collator(rows)
    return {**batch, "attention_mask": batch.get("attention_mask", torch.ones_like(batch["input_ids"]))}


def trainer_facts(
    trainer: MeteredTrainer,
    parameters: tuple[int, int],
    micro_batches: int,
    padding: bool,
) -> dict[str, Any]:
    """Return the fields of a `Prediction` that are known from a Trainer which has trained.

    Args:
        parameters: how many there are, and how many of them are trained.
        micro_batches: how many a step of the recipe has.
        padding: whether batches contain padding.
    """
    config = cast("Any", trainer.model).config.get_text_config()
    return {
        "micro_batch_size": trainer.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "parameters": parameters[0],
        "trainable_parameters": parameters[1],
        "padding": padding,
        "has_experts": any(getattr(config, name, None) for name in EXPERT_COUNTS),
    }


def _enlarge(trainer: Any, size: int, count: int) -> None:
    """Let every step hold the inputs of `count` micro-batches of `size` sequences, however few it fetches."""
    fetch = trainer.get_batch_samples
    fetched = trainer.args.gradient_accumulation_steps
    rows = [size] * fetched
    if fetched > 1:
        # The last but one micro-batch is as large as itself and all those together that are not fetched.
        rows[-2] = size * (count - fetched + 1)

    def fetch_large(*args: Any) -> Any:
        batches, items = fetch(*args)
        large = []
        for row_count, batch in zip(rows, batches, strict=True):
            large.append({name: tensor.new_empty((row_count, *tensor.shape[1:])) for name, tensor in batch.items()})
        return large, items

    trainer.get_batch_samples = fetch_large


def _text_to_cut(recipe: Recipe) -> tuple[Any, Any, int, int]:
    """Return `Blocks.text`: the recipe's own text, tokenizer, length and batch where a technique cuts examples from it,
    since then the lengths of its pieces do matter. Otherwise the text is empty, and there is no tokenizer."""
    whole: Any = ""
    tokenizer = None
    owners = techniques_with_examples(recipe)
    if owners:
        tokenizer = _load_tokenizer_once(locate_config(recipe.model))
        text = corpus.load_corpus(recipe.corpus)
        corpus.check_in_memory(text, owners)
        whole = _label(text, tokenizer) if text.loss else str(text.train)
    return whole, tokenizer, recipe.sequence_length, recipe.effective_batch_size


@lru_cache(maxsize=1)
def _label(text: corpus.Corpus, remembering: Any) -> tuple[list[tuple[int, int]], ...]:
    """Return the tokens of each conversation, with their labels. The next prediction gets the same ones."""
    return tuple(corpus.Conversations(text, remembering.tokenizer))


class _RememberingTokenizer:
    """A tokenizer that remembers its answers, since every prediction asks for the same texts.

    It pickles as the name of its model, so that `datasets` does not hash what it remembers.
    """

    def __init__(self, source: ModelSource) -> None:
        tokenizer = load_tokenizer(source)
        self.source = source
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=REMEMBERED_TEXTS)(lambda text: tokenizer(text, verbose=False)["input_ids"])

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __reduce__(self) -> Any:
        return _RememberingTokenizer, (self.source,)


_load_tokenizer_once = lru_cache(maxsize=2)(_RememberingTokenizer)
