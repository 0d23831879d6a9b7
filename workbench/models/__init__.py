"""What is trained: model families, where their weights come from, loading and saving."""

from workbench.models.gpt2 import SIZES, learning_rate
from workbench.models.load import count_parameters, load_config, load_model, load_tokenizer, quiet
from workbench.models.source import locate, resolve_auto

__all__ = ["SIZES", "count_parameters", "learning_rate", "load_config", "load_model", "load_tokenizer", "locate"]
__all__ += ["quiet", "resolve_auto"]
