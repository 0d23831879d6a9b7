"""Models: their families, the places of their weights, loading and saving."""

from workbench.models.gpt2 import learning_rate
from workbench.models.known import PUBLISHED
from workbench.models.load import count_parameters, load_config, load_model, load_tokenizer, quiet
from workbench.models.source import locate, locate_config, resolve_auto

__all__ = ["PUBLISHED", "count_parameters", "learning_rate", "load_config", "load_model", "load_tokenizer", "locate"]
__all__ += ["locate_config", "quiet", "resolve_auto"]
