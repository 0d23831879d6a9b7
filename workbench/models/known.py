"""Published models of which the config is known without the hub (`known.toml`), and which kinds can be trained."""

import difflib
from typing import Any

from workbench.base.errors import ConfigurationError
from workbench.base.paths import read_beside
from workbench.models.family import dropout_fields

PUBLISHED: dict[str, dict[str, Any]] = read_beside(__file__, "known.toml")

# The beginnings of the names of parts that make a model more than a text model.
SENSES = ("vision", "audio", "image")

# The ranges, ends included, of numbers in a config, by their usual names.
RANGES: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 1_000),
    "initializer_range": (0, 10),
    "hidden_size": (1, 10_000_000),
    "num_attention_heads": (1, 10_000_000),
    "vocab_size": (1, 10_000_000),
    "max_position_embeddings": (1, 10_000_000),
    "layer_norm_epsilon": (1e-12, 1),
    "layer_norm_eps": (1e-12, 1),
    "rms_norm_eps": (1e-12, 1),
}


def check_kind(name: str, written: dict[str, Any]) -> None:
    """Refuse a config.json from which transformers cannot build a decoder.

    Args:
        written: the contents of the file.

    Raises:
        ConfigurationError: the model is of another kind, or of one that this version of transformers does not have.
        ValueError: the file does not name a kind.
    """
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto import modeling_auto as auto

    model_type = written.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ValueError(f"model_type is {model_type!r}")
    if "auto_map" in written and model_type not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"model: {name!r} brings code of its own, which the workbench does not run. Use a "
            "model whose architecture transformers has, or predict your own script with `workbench "
            "emulate`."
        )
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, 1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            f"model: {name!r} is a {model_type!r}, which transformers {__version__} does not know. "
            f"{guess}A newer one may: pip install --upgrade transformers."
        )
    masked = model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not written.get("is_decoder")
    if masked or written.get("is_encoder_decoder") or model_type not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigurationError(
            f"model: {name!r} is a {model_type!r}, which is not a causal language model, and the "
            "workbench trains those alone: GPT-2, Llama, Qwen and all others of transformers' "
            "AutoModelForCausalLM. For other programs there is `workbench emulate`."
        )


def check_parts(name: str, config: Any) -> None:
    """Raise ConfigurationError for a model that has other parts than a text model, or that is quantized."""
    others = sorted(part for part in config.sub_configs if part != "text_config")
    # A few models with other parts have their text model's settings among their own, so that the names decide.
    if config.get_text_config() is not config or any(part.startswith(SENSES) for part in others):
        named = f" ({', '.join(others)})" if others else ""
        raise ConfigurationError(
            f"model: {name!r} is a {config.model_type!r}: a text model with other parts{named}, and "
            "the workbench trains text models alone. Use one of its family without them, or "
            "`workbench emulate`."
        )
    quantized = getattr(config, "quantization_config", None)
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise ConfigurationError(
            f"model: {name!r} says that it is quantized ({method}), and such weights cannot be "
            "fine-tuned as they are. Use the model it was made of; the technique qlora quantizes "
            "it."
        )


def check_ranges(config: Any) -> None:
    """Raise ValueError for a number that no model can have."""
    text = config.get_text_config()
    other_names = getattr(text, "attribute_map", {})  # GPT-2, for example, calls its hidden_size n_embd
    ranges = RANGES | dict.fromkeys(dropout_fields(config), (0, 1))
    for usual_name, (low, high) in ranges.items():
        name = other_names.get(usual_name, usual_name)
        value = getattr(text, name, None)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}, which is not from {low:,} to {high:,}")
