"""What is trained: model families, where their weights come from, loading and saving."""

from workbench.models.family import ModelFamily
from workbench.models.generate import generate
from workbench.models.gpt2 import GPT2, SIZES, gpt2_tokenizer, learning_rate
from workbench.models.known import family_of
from workbench.models.load import (
    count_parameters,
    load_config,
    load_model,
    load_tokenizer,
    quiet,
    save_model,
    skeleton,
    storage_type,
)
from workbench.models.source import ModelSource, locate, locate_config, resolve_auto

__all__ = [
    "GPT2", "SIZES", "ModelFamily", "ModelSource", "count_parameters", "family_of", "generate", "gpt2_tokenizer",
    "learning_rate", "load_config", "load_model", "load_tokenizer", "locate", "locate_config", "quiet", "resolve_auto",
    "save_model", "skeleton", "storage_type",
]  # fmt: skip
