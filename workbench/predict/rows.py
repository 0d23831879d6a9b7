"""What a prediction trains on: rows of any tokens, and of a large step as few of them as give the same memory."""

from functools import lru_cache
from typing import Any, cast

from datasets import Dataset

from workbench.errors import ConfigurationError
from workbench.models.load import load_tokenizer
from workbench.models.source import ModelSource, locate_config
from workbench.recipe import Recipe
from workbench.run.job import own_examples
from workbench.run.trainer import argument_values
from workbench.texts import corpus
from workbench.texts.corpus import Blocks, TrainingText

MICRO_BATCHES = 3  # of a step are trained, the first ones and the last: each finds what the second found
LISTED = 256  # micro-batches of a step are listed; the inputs of more are held in one piece
TOKENS = 2**18  # of a step are made on the host; more are on the device only, where nobody reads them
AT_ONCE = 65_535  # sequences: what is beside each other in a grid of CUDA's; `attention.cu` refuses more
TEXTS = 2**14  # whose tokens are kept
EVALUATED = 3  # batches of an evaluation, and a smaller last one: the third finds what the second left, and so on


def listed(recipe: Recipe) -> tuple[int, int]:
    """Of each micro-batch the sequences, and of each step the micro-batches, that are made and moved to the device."""
    arguments = recipe.training_arguments()
    count = min(arguments["gradient_accumulation_steps"], LISTED)
    size: int = arguments["per_device_train_batch_size"]
    return min(size, max(1, TOKENS // (recipe.shape.tokens * count))), count


def blocks_for(recipe: Recipe) -> Blocks:
    """A step's blocks, and held-out ones in batches of every size that an evaluation has; which tokens does not matter.

    `make_blocks` cuts as many as HELD_OUT_TOKENS allow.
    """
    length, (size, count) = recipe.sequence_length, listed(recipe)
    together: int = argument_values(recipe, 0.0)["per_device_eval_batch_size"]
    whole, rest = divmod(max(1, corpus.HELD_OUT_TOKENS // length), together)
    rows = max(size * count, min(recipe.effective_batch_size, TOKENS // length))
    numbers = rows, min(whole, EVALUATED) * together + rest
    train, held_out = (Dataset.from_dict({"input_ids": [list(range(length))] * n}) for n in numbers)
    return Blocks(train, held_out, _text(recipe))


def shorten(trainer_arguments: Any, recipe: Recipe) -> tuple[int, int]:
    """Let the Trainer fetch what is `listed`. Returns the true numbers, for `enlarge`.

    Raises ConfigurationError for more sequences at once than kernels take.
    """
    if trainer_arguments.per_device_train_batch_size > AT_ONCE:
        raise ConfigurationError(
            f"predict: CUDA's attention kernels take {AT_ONCE:,} sequences at once, and this step has "
            f"{trainer_arguments.per_device_train_batch_size:,}. Lower effective_batch_size, or add "
            "gradient_accumulation."
        )
    true = trainer_arguments.per_device_train_batch_size, trainer_arguments.gradient_accumulation_steps
    trainer_arguments.per_device_train_batch_size, trainer_arguments.gradient_accumulation_steps = listed(recipe)
    return true


def enlarge(trainer: Any, size: int, count: int) -> None:
    """Let every step hold `count` micro-batches of `size` sequences, however few are fetched."""
    fetch, made = trainer.get_batch_samples, trainer.args.gradient_accumulation_steps
    if (size, count) == (trainer.args.per_device_train_batch_size, made):
        return

    def fetched(*args: Any) -> Any:
        batches, items = fetch(*args)
        rows = [size] * made
        rows[-2:-1] = [size * (count - made + 1)] * len(rows[-2:-1])
        large = [
            {name: tensor.new_empty((n, *tensor.shape[1:])) for name, tensor in batch.items()}
            for n, batch in zip(rows, batches, strict=True)
        ]
        return large, items

    trainer.get_batch_samples = fetched


def _text(recipe: Recipe) -> TrainingText:
    """The text itself, if a technique cuts it in its own way: then its lengths do matter."""
    shape = {"sequence_length": recipe.sequence_length, "batch": recipe.effective_batch_size}
    if not own_examples(recipe):
        return TrainingText(text="", tokenizer=cast("Any", None), **shape)
    tokenizer = cast("Any", _known_tokenizer(locate_config(recipe.model)))
    text = corpus.load_corpus(recipe.corpus)
    corpus.check_in_memory(text, own_examples(recipe))
    return TrainingText(text=str(text.train), tokenizer=tokenizer, **shape)


class _Remembering:
    """A tokenizer that is asked for the same texts in every prediction, and is not to be hashed with them."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.tokenizer = source, (tokenizer := load_tokenizer(source))
        self.encode = lru_cache(maxsize=TEXTS)(lambda text: tokenizer(text, verbose=False)["input_ids"])

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": self.encode(text)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __reduce__(self) -> Any:
        return _Remembering, (self.source,)


_known_tokenizer = lru_cache(maxsize=2)(_Remembering)
