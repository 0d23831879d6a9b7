"""Checks that the files of a model belong together: tokenizer and vocabulary, output layer and embedding."""

from pathlib import Path
from typing import Any

from workbench.base.errors import ConfigurationError, in_a_line
from workbench.base.limits import call_within
from workbench.models.family import on_meta
from workbench.models.source import ModelSource

SAMPLE_S = 30.0  # seconds for the tokens of a short sample, which usually take milliseconds
MOST_UNKNOWN = 0.5  # the largest share of unknown tokens; with more, there is nothing to learn
VOCABULARY_SHARE = 0.9  # a model's own tokenizer has tokens for at least this share of the embeddings
SAVE_BOTH = "Save the tokenizer that belongs to the model into its folder."


def check_vocabulary(source: ModelSource, config: Any, tokenizer: Any) -> None:
    """Raise ConfigurationError if the tokenizer can produce ids that the model has no embedding for."""
    largest_id = max(tokenizer.get_vocab().values(), default=0)
    embeddings = config.get_text_config().vocab_size
    if largest_id >= embeddings:
        raise ConfigurationError(
            f"model: {source.name} has embeddings for {embeddings} tokens, but its tokenizer's ids "
            f"go up to {largest_id}. {SAVE_BOTH}"
        )


def check_tokenizer(source: ModelSource, config: Any, tokenizer: Any, sample: str) -> tuple[str, ...]:
    """Return remarks: on signs that the tokenizer is another model's, and on unknown tokens in a sample of the text.

    Raises:
        ConfigurationError: it does not know most of the sample, fails on it, or takes more than SAMPLE_S.
    """
    try:
        notice = f"model: waiting for the tokenizer of {source.name!r}"
        ids = call_within(SAMPLE_S, lambda: tokenizer(sample, verbose=False)["input_ids"], notice)
    except Exception as error:  # an expression in its file, or its own code, may raise anything
        raise ConfigurationError(
            f"model: the tokenizer of {source.name!r} cannot read the text ({in_a_line(error)}). {SAVE_BOTH}"
        ) from None
    unknown = ids.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    if not ids or unknown > MOST_UNKNOWN * len(ids):
        raise ConfigurationError(
            f"model: the tokenizer of {source.name!r} does not know the text: {unknown:,} of the "
            f"first {len(ids):,} tokens are {tokenizer.unk_token!r}. Use a text in its language, "
            f"or another model. {SAVE_BOTH}"
        )
    remarks = [] if source.random else _signs_of_another_model(config, tokenizer)
    if unknown:
        remarks.insert(0, f"model: {unknown:,} of the first {len(ids):,} tokens of the text are unknown to it")
    return tuple(remarks)


def _signs_of_another_model(config: Any, tokenizer: Any) -> list[str]:
    """Return a remark for each sign that a tokenizer was made for another model."""
    text = config.get_text_config()
    remarks = []
    if len(tokenizer) < VOCABULARY_SHARE * text.vocab_size:
        remarks.append(
            f"model: the tokenizer has {len(tokenizer):,} tokens for {text.vocab_size:,} "
            "embeddings: it may be another model's"
        )
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if ends != [None] and not {*ends} & {*tokenizer.all_special_ids}:
        word = tokenizer.convert_ids_to_tokens(ends[0]) if ends[0] < len(tokenizer) else None
        remarks.append(
            f"model: the config ends a text with token {ends[0]}, which is {word!r} in the "
            "tokenizer and no special token there: it may be another model's"
        )
    return remarks


def check_head(config: Any, folder: Path) -> None:
    """Raise ValueError if the config ties the output layer to the embedding, and the files have two different ones.

    transformers would train both, against the config.
    """
    import torch
    from safetensors import safe_open

    if not config.get_text_config().tie_word_embeddings:
        return
    model = on_meta(config)
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    names = {f"{name}.weight" for name, module in model.named_modules() if module in ends}
    weights: list[torch.Tensor] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights += map(file.get_tensor, names.intersection(file.keys()))
    if len(weights) == len(ends) and not torch.equal(*weights):
        raise ValueError(
            "the config ties the output layer to the embedding, and the file has another output layer; write "
            '"tie_word_embeddings": false, if that is meant'
        )
