"""A located model, its config and its tokenizer, loaded; and saved so that it can be loaded again."""

import copy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import ConfigurationError
from workbench.models.gpt2 import SIZES, gpt2_tokenizer
from workbench.models.known import family_of
from workbench.models.source import ModelSource, base_of, virtual_tokens

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BUILT = ("dtype", "attn_implementation")  # arguments of loading that a new model is made with just as well


def load_config(source: ModelSource) -> "PreTrainedConfig":
    """The model's config. Raises ConfigurationError if it is not a GPT-2."""
    from transformers import AutoConfig, GPT2Config

    if source.random and source.location in SIZES:
        return GPT2Config(**SIZES[source.location])
    if source.adapter:
        return load_config(base_of(source))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"model: the config of {source.name!r} cannot be read: {error}") from None
    family_of(config, source.name)
    return config


def load_tokenizer(source: ModelSource) -> "PreTrainedTokenizerBase":
    """The model's tokenizer; GPT-2's own, embedded, where a model of its vocabulary brings none."""
    from transformers import AutoTokenizer

    if source.random and source.location in SIZES:
        return gpt2_tokenizer()
    if Path(source.location).is_dir() and not (Path(source.location) / "tokenizer.json").exists():
        return gpt2_tokenizer()
    try:
        return AutoTokenizer.from_pretrained(source.location, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain ones
        raise ConfigurationError(
            f"model: the tokenizer of {source.name!r} cannot be read: {str(error).splitlines()[0]}. Save it again with "
            "save_pretrained(), or delete tokenizer.json to use GPT-2's own."
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' remarks and progress bars, which a user of the workbench can do nothing about."""
    import datasets
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    data_bars = datasets.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:  # not where this stands inside another one of its kind
            transformers_logging.enable_progress_bar()
        if data_bars:
            datasets.enable_progress_bars()


def load_model(source: ModelSource, config: "PreTrainedConfig", **arguments: Any) -> "PreTrainedModel":
    """The model, in fp32 unless `dtype` says otherwise, on the CPU unless `device_map` says otherwise.

    An adapter is merged into its base; one of virtual tokens cannot be, and stays beside it. As with `from_pretrained`,
    an argument that is a setting of the config, for example `activation_function`, changes it; the config given stays
    as it is.
    """
    config, arguments = settled(config, {"dtype": "float32", **arguments})
    built = {name: value for name, value in arguments.items() if name in BUILT}
    with quiet():
        if not (source.random or source.adapter):
            model = _from_checkpoint(source, config, arguments)
        else:
            model = _new(config, built) if source.random else _with_adapter(source, config, built)
            if arguments.keys() > built.keys():
                model = _loaded_again(model, source, config, arguments)
    # GPT-2's class sets none: the Trainer would then count T predictions in a sequence of T tokens, not T - 1, and
    # divide the loss by too much (transformers 5.23, `Trainer._get_num_items_in_batch`)
    model.loss_type = "ForCausalLM"
    return model


def settled(config: "PreTrainedConfig", arguments: dict[str, Any]) -> tuple["PreTrainedConfig", dict[str, Any]]:
    """A copy of the config with those arguments that are settings of it, and the other arguments."""
    settings = {name: value for name, value in arguments.items() if name not in BUILT and hasattr(config, name)}
    config = copy.deepcopy(config)
    config.update(settings)
    return config, {name: value for name, value in arguments.items() if name not in settings}


def _loaded_again(
    model: "PreTrainedModel", source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]
) -> "PreTrainedModel":
    """The same weights through `from_pretrained`, for arguments that act on loading, as quantization does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _from_checkpoint(replace(source, location=folder), config, arguments)


def _from_checkpoint(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> "PreTrainedModel":
    """The saved weights, all of them: transformers would fill a missing layer with random ones."""
    from transformers import AutoModelForCausalLM

    load = cast("Any", AutoModelForCausalLM.from_pretrained)  # its annotation forgets the second result
    model: PreTrainedModel
    arguments = {**arguments, "config": config, "use_safetensors": True, "output_loading_info": True}
    try:
        model, report = load(source.location, trust_remote_code=False, **arguments)
    except OSError as error:
        raise ConfigurationError(f"model: the weights of {source.name!r} cannot be had: {error}") from None
    missing = sorted(set(report["missing_keys"]) - set(family_of(config).tied_weights))
    if missing:
        raise ConfigurationError(
            f"model: the checkpoint of {source.name!r} has no weights for {missing[0]!r} ({len(missing)} are missing). "
            "Save it again, whole, with save_pretrained()."
        )
    return model


def _new(config: "PreTrainedConfig", arguments: dict[str, Any]) -> "PreTrainedModel":
    """New weights under a fixed seed, so that `random:gpt2` is one definite model, cast to `dtype` afterwards."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = cast("Any", AutoModelForCausalLM).from_config(config, **{**arguments, "dtype": "float32"})
        model: PreTrainedModel = made.to(getattr(torch, arguments["dtype"]))
    return model


def _with_adapter(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> "PreTrainedModel":
    """The base model with the adapter merged into its weights, or with its virtual tokens before every text."""
    from peft import PeftModel

    base = load_model(base_of(source), config, **arguments)
    adapted = PeftModel.from_pretrained(base, source.location)
    if virtual_tokens(source):
        return adapted  # type: ignore[no-any-return]
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)  # PEFT froze the base; the merged model may be trained again


def count_parameters(model: "PreTrainedModel") -> tuple[int, int]:
    """(all, trainable). A weight of bitsandbytes counts as the numbers it stands for, not as the bytes they are in."""
    numbers = [(_shape(p).numel(), p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in numbers), sum(count for count, trainable in numbers if trainable)


def _shape(parameter: "torch.nn.Parameter") -> "torch.Size":
    state = getattr(parameter, "quant_state", None)
    return parameter.shape if state is None else state.shape


def storage_type(model: "PreTrainedModel") -> str:
    """In what the weights are stored: `float32`, or `nf4 + float32` where some are quantized by bitsandbytes."""
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    quantized = sorted({str(state.quant_type) for state in states if state is not None})
    return " + ".join([*quantized, str(model.dtype).removeprefix("torch.")])


def save_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", source: ModelSource, form: str, folder: Path
) -> None:
    """Write a model that `load` reads again.

    Args:
        form: `"merged"` writes whole weights, an adapter folded in; `"adapter"` writes the adapter alone.

    Raises:
        ConfigurationError: `"adapter"` for a model without one.
    """
    from peft import PeftModel

    adapted = isinstance(model, PeftModel)
    if form == "adapter" and not adapted:
        raise ConfigurationError("save: this model has no adapter. Save it as 'merged'.")
    if form == "merged" and adapted:
        model = cast("Any", model).merge_and_unload()
    elif adapted:
        for config in model.peft_config.values():
            config.base_model_name_or_path = source.name
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
