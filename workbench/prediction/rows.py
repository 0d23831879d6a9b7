"""What a prediction trains: a model without memory, on rows of any tokens, of a large step as few as give the same
memory; and its Trainer."""

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
from workbench.models.load import BUILT, load_config, load_tokenizer, quiet, settled
from workbench.models.source import ModelSource, locate_config
from workbench.recipe import BALANCED, STRATEGY, Recipe
from workbench.texts import corpus
from workbench.texts.corpus import Blocks
from workbench.training.arguments import EPOCHS, argument_values, check_optimizer, training_arguments
from workbench.training.job import Job, Material, check_model, own_examples, prepare
from workbench.training.ranks.shards import Ranks, shared
from workbench.training.ranks.zero import trainer_of
from workbench.training.trainer import SeamTrainer, assemble
from workbench.training.world import World

STEPS = 3  # states are made in the first; the allocator has found its form after the second
MICRO_BATCHES = 3  # of a step are trained, the last one too: each finds what the second found
LISTED = 256  # micro-batches of a step are listed; the inputs of more are held in one piece
TOKENS = 2**18  # of a step are made on the host; more are on the device only, unread
AT_ONCE = 65_535  # sequences beside each other in a grid of CUDA's; `attention.cu` refuses more
TEXTS = 2**14  # whose tokens are kept
# of a config: a mixture of experts
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
EVALUATED = 3  # batches of an evaluation, and a smaller last one: each finds what the second left

Batch = dict[str, torch.Tensor]


def listed(recipe: Recipe, world_size: int = 1) -> tuple[int, int]:
    """Of each micro-batch the sequences, and of each step the micro-batches, that a rank makes and moves to its
    device."""
    size, count = shared(recipe.training_arguments(), world_size)
    count = min(count, max(MICRO_BATCHES, LISTED // world_size))
    return min(size, max(1, TOKENS // (recipe.shape.tokens * count * world_size))), count


def blocks_for(
    recipe: Recipe,
    held_out: int | None = None,
    *,
    every: bool = False,
    ranks: Ranks | None = None,
) -> Blocks:
    """The blocks of all STEPS, and held-out ones in batches of every size that an evaluation has; which tokens does not
    matter.

    Args:
        held_out: rows that are evaluated; by default as many as `make_blocks` cuts from HELD_OUT_TOKENS.
        every: each batch of them, because something is kept of each.
    """
    length = recipe.sequence_length
    world_size = ranks.count if ranks else 1
    size, count = listed(recipe, world_size)
    together: int = argument_values(recipe, 0.0)["per_device_eval_batch_size"]
    whole, rest = divmod(held_out or max(1, corpus.HELD_OUT_TOKENS // length), together)
    rows = max(size * count * world_size, min(recipe.effective_batch_size, TOKENS // length))
    if not every:
        whole = min(whole, EVALUATED)
    return Blocks(_dataset(STEPS * rows, length), _dataset(whole * together + rest, length), _text(recipe))


def _dataset(rows: int, length: int) -> Dataset:
    return Dataset.from_dict({"input_ids": [list(range(length))] * rows})


def material_for(recipe: Recipe, blocks: Blocks) -> Material:
    """What a prediction trains instead of what the recipe names: nothing of it is downloaded but a config.

    Raises ConfigurationError: the model cannot be used, its length, or with a technique.
    """
    source = locate_config(recipe.model)
    config = load_config(source)
    check_model(recipe, source, config)
    return Material(source=source, config=config, tokenizer=None, blocks=blocks)


def can_be_skeleton(config: PreTrainedConfig, arguments: dict[str, Any]) -> bool:
    """Whether these arguments of `from_pretrained` do not act while weights are loaded, as quantization does."""
    return not settled(config, arguments)[1].keys() - BUILT


def skeleton(config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """The model on the meta device: shapes and types, no memory.

    Args:
        arguments: of `from_pretrained`: `dtype`, `attn_implementation` and settings of the config.

    Raises:
        ConfigurationError: another argument, whose effect on loading would be missed.
    """
    config, arguments = settled(config, {"dtype": "float32", **arguments})
    missed = arguments.keys() - BUILT
    if missed:
        raise ConfigurationError(
            f"predict: {min(missed)} acts while weights are loaded, "
            "which a prediction does not do. Measure this recipe with `run`, "
            "or give the technique that asks for it a `stand_in`."
        )
    with quiet(), torch.device("meta"), no_init_weights():
        model: PreTrainedModel = cast("Any", AutoModelForCausalLM).from_config(config, **arguments)
    model.tie_weights()
    model.loss_type = "ForCausalLM"  # as `load_model` sets it
    return model


def give_tensors(model: PreTrainedModel, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Another tensor for every parameter and buffer, in the order in which `model.to` moves them; tied ones stay tied.

    What `make` returns takes the place, even where `register_parameter` and `setattr` would refuse it.
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
                    others[other] = other  # a module may have two parents
                tensors[name] = others[tensor]

    model.apply(visit)


def job_for(recipe: Recipe, device: Device, material: Material, ranks: Ranks | None = None) -> Job:
    """The job of a prediction. No program is told of it, no callback is called, and an epoch has no length. Raises
    ConfigurationError as the gate does."""
    if recipe.arguments.get(STRATEGY) == BALANCED:
        raise ConfigurationError(
            f"predict: {STRATEGY}={BALANCED!r} makes micro-batches of unequal numbers of rows, "
            "which a prediction does not know. Leave it out for an upper bound; "
            "`workbench scan FILE` says what it needs."
        )
    arguments = dict(recipe.arguments)
    for unused in ("report_to", EPOCHS):
        arguments.pop(unused, None)
    # transformers' own are asked what they need; another's code would be imported for that
    callbacks = tuple(filter(re.compile(r"transformers\b").match, recipe.callbacks))
    world = World(device)
    if ranks:
        world = World(device, ranks.highest, ranks.count, ranks.shard)
    return prepare(replace(recipe, arguments=arguments, callbacks=callbacks), world, material=material)


def assembled(
    job: Job,
    model: Any,
    meter: Meter,
    device: torch.device,
    scratch: Path,
    callbacks: Any = (),
) -> tuple[SeamTrainer, int]:
    """A Trainer that fetches what is `listed`, and how many micro-batches a step of the recipe has, on each rank.

    Args:
        device: on which the tensors are, real or not: it plays the job's own.

    Raises ConfigurationError for more sequences at once than kernels take.
    """
    world = job.world
    size, count = shared(job.arguments, world.world_size)
    if size > AT_ONCE:
        raise ConfigurationError(
            f"predict: CUDA's attention kernels take {AT_ONCE:,} sequences at once, "
            f"and this step has {size:,}. Lower effective_batch_size, "
            "or split it into micro-batches."
        )
    fetched = listed(job.recipe, world.world_size)
    batches = {
        "per_device_train_batch_size": fetched[0],
        # of which each rank takes its part
        "gradient_accumulation_steps": fetched[1] * world.world_size,
    }
    arguments = training_arguments(job.arguments | batches, device.type, scratch)
    check_optimizer(job.recipe, job.material.config, arguments, job.callbacks)
    trainer_kind: Callable[..., SeamTrainer] = SeamTrainer
    if world.shard:
        trainer_kind = trainer_of(world.shard)
    trainer = assemble(job.recipe, model, job.data, arguments, meter, [*callbacks], trainer_kind)
    if (size, count) != fetched:
        _enlarge(trainer, size, count)
    return trainer, count


def masked(collator: Callable[..., Batch], rows: Any) -> Batch:
    """A batch with the mask that comes with padding."""
    batch = collator(rows)
    return {**batch, "attention_mask": batch.get("attention_mask", torch.ones_like(batch["input_ids"]))}


def facts(
    trainer: SeamTrainer,
    parameters: tuple[int, int],
    micro_batches: int,
    padding: bool,
) -> dict[str, Any]:
    """The fields of a `Prediction` that a trainer knows when it has trained."""
    config = cast("Any", trainer.model).config.get_text_config()
    return {
        "micro_batch_size": trainer.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "parameters": parameters[0],
        "trainable_parameters": parameters[1],
        "padding": padding,
        "has_experts": any(getattr(config, name, None) for name in EXPERTS),
    }


def _enlarge(trainer: Any, size: int, count: int) -> None:
    """Let every step hold `count` micro-batches of `size` sequences, however few are fetched."""
    fetch = trainer.get_batch_samples
    fetched = trainer.args.gradient_accumulation_steps
    rows = [size] * fetched
    if fetched > 1:  # the last but one stands for all those that are not fetched, too
        rows[-2] = size * (count - fetched + 1)

    def enlarged(*args: Any) -> Any:
        batches, items = fetch(*args)
        large = []
        for row_count, batch in zip(rows, batches, strict=True):
            large.append({name: tensor.new_empty((row_count, *tensor.shape[1:])) for name, tensor in batch.items()})
        return large, items

    trainer.get_batch_samples = enlarged


def _text(recipe: Recipe) -> tuple[Any, Any, int, int]:
    """The text itself, if a technique cuts it in its own way: then its lengths do matter."""
    whole: Any = ""
    tokenizer = None
    owners = own_examples(recipe)
    if owners:
        tokenizer = _known_tokenizer(locate_config(recipe.model))
        text = corpus.load_corpus(recipe.corpus)
        corpus.check_in_memory(text, owners)
        whole = _labelled(text, tokenizer) if text.loss else str(text.train)
    return whole, tokenizer, recipe.sequence_length, recipe.effective_batch_size


@lru_cache(maxsize=1)
def _labelled(text: corpus.Corpus, remembering: Any) -> tuple[list[tuple[int, int]], ...]:
    return tuple(corpus.Conversations(text, remembering.tokenizer))


class _Remembering:
    """A tokenizer that is asked for the same texts in every prediction, and is not to be hashed with them."""

    def __init__(self, source: ModelSource) -> None:
        tokenizer = load_tokenizer(source)
        self.source = source
        self.tokenizer = tokenizer
        self.encode = lru_cache(maxsize=TEXTS)(lambda text: tokenizer(text, verbose=False)["input_ids"])

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __reduce__(self) -> Any:
        return _Remembering, (self.source,)


_known_tokenizer = lru_cache(maxsize=2)(_Remembering)
