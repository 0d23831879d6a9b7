"""Loading a located model, its config and its tokenizer; and saving them so that they can be loaded again."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.base.errors import ConfigurationError, UnavailableError, explain_errors
from workbench.models.belongs import check_head
from workbench.models.download import TOKENIZERS
from workbench.models.family import family_of, on_meta
from workbench.models.gpt2 import GPT2_TOKENS, gpt2_tokenizer
from workbench.models.known import PUBLISHED, check_kind, check_parts, check_ranges
from workbench.models.source import EMBEDDED, ModelSource, base_of, locate, virtual_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Arguments of `from_pretrained` that `from_config` takes too: they need no weights.
BUILD_ARGUMENTS = ("dtype", "attn_implementation")


def load_config(source: ModelSource) -> "PreTrainedConfig":
    """Load the config of a model. Raises ConfigurationError if it is not a decoder's, or no model can be built of
    it."""
    from transformers import AutoConfig, PreTrainedConfig

    if source.adapter:
        return load_config(base_of(source))
    cure = "Correct it, or save config.json again with save_pretrained()."
    with explain_errors(f"model: the config of {source.name!r} cannot be used", cure):
        if source.random and source.location in PUBLISHED:
            return AutoConfig.for_model(**PUBLISHED[source.location])
        check_kind(source.name, PreTrainedConfig.get_config_dict(source.location)[0])
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
        check_ranges(config)
        check_parts(source.name, config)
        family_of(config)  # builds a model without memory, which finds every other fault
    return config


def check_trainable(source: ModelSource, config: "PreTrainedConfig") -> None:
    """Check that names and shapes of the weights are those of the config, or an adapter's those of its base.

    They are loaded on the meta device, where they take no memory.

    Raises:
        ConfigurationError: they are not; transformers and PEFT would fill what is missing at random, and drop the rest.
            Or the source is an adapter that cannot be merged into weights to go on from.
    """
    import torch
    from peft import PeftModel

    tokens = virtual_tokens(source) if source.adapter else 0
    if tokens:
        raise ConfigurationError(
            f"model: {source.name!r} is an adapter of {tokens} virtual tokens, which cannot be "
            f"merged into weights to fine-tune. Start from its base, {base_of(source).name!r}."
        )
    partner = "base" if source.adapter else "config"
    cure = f"Copy or save weights and {partner} again, together, with save_pretrained()."
    with quiet(), explain_errors(f"model: the weights of {source.name!r} do not suit its {partner}", cure):
        if source.adapter:
            check_trainable(base_of(source), config)
            with torch.device("meta"):
                model = PeftModel.from_pretrained(on_meta(config), source.location, low_cpu_mem_usage=True)
                # Load it a second time, because only this function returns a report.
                report = model.load_adapter(source.location, "default", low_cpu_mem_usage=True)
            _compare(report._asdict())
        elif not source.random:
            on_meta_device = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
            _, report = _from_checkpoint(source, config, on_meta_device)
            _compare(report)
            check_head(config, Path(source.location))


def _compare(report: dict[str, Any]) -> None:
    """Raise ValueError if weights are missing, too many, or of other shapes.

    Args:
        report: the differences that loading has found, as transformers and PEFT name them.
    """
    faults = [f"{name!r} is missing" for name in sorted(report["missing_keys"])]
    for name in sorted(report["unexpected_keys"]):
        if not name.endswith(".attn.masked_bias"):  # old files of GPT-2 have these, and nothing uses them
            faults.append(f"{name!r} is too much")
    for name, shape, wanted in sorted(report.get("mismatched_keys", ())):
        faults.append(f"{name!r} has the shape {[*shape]}, not {[*wanted]}")
    if faults:
        raise ValueError(f"{faults[0]}; {len(faults)} such")


def load_tokenizer(source: ModelSource) -> Any:
    """Load the model's tokenizer.

    New weights of a published config have an embedded one: GPT-2's, or gpt2-tiny's if the vocabulary is smaller than
    GPT-2's. A GPT-2 that brings no tokenizer has GPT-2's.

    Raises:
        ConfigurationError: another model brings none, or its tokenizer cannot be read.
        UnavailableError: it needs a package that is not installed.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    folder = Path(source.location)
    tokenizers = [name for name in TOKENIZERS if (folder / name).exists()]
    if source.random and source.location in PUBLISHED:
        vocabulary_size = PUBLISHED[source.location].get("vocab_size", GPT2_TOKENS)
        return load_tokenizer(locate(EMBEDDED)) if vocabulary_size < GPT2_TOKENS else gpt2_tokenizer()
    if not tokenizers:
        base = base_of(source) if source.adapter else source
        config, _ = PreTrainedConfig.get_config_dict(base.location)
        if config.get("model_type") != "gpt2":
            raise ConfigurationError(
                f"model: {source.name!r} has no tokenizer. Save the one that belongs to it into its folder."
            )
        return gpt2_tokenizer()
    if all(name.endswith(".model") for name in tokenizers) and not find_spec("sentencepiece"):
        # The message of transformers would name tiktoken.
        raise UnavailableError(
            f"model: the tokenizer of {source.name!r} needs the package sentencepiece. Install it: "
            "pip install sentencepiece"
        )
    cure = "Save it again with save_pretrained()."
    with explain_errors(f"model: the tokenizer of {source.name!r} cannot be read", cure):
        return AutoTokenizer.from_pretrained(source.location, trust_remote_code=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' remarks and progress bars, about which a user of the workbench can do nothing."""
    import datasets
    from transformers.utils import logging as transformers_logging

    with ExitStack() as restore, warnings.catch_warnings():
        restore.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        transformers_logging.set_verbosity_error()
        # Inside another `quiet` the bars are off already, and have to stay so when this one ends.
        if transformers_logging.is_progress_bar_enabled():
            restore.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        if datasets.is_progress_bar_enabled():
            restore.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def load_model(source: ModelSource, config: "PreTrainedConfig", **arguments: Any) -> "PreTrainedModel":
    """Load a model, in fp32 unless `dtype` says otherwise, on the CPU unless `device_map` says otherwise.

    An adapter is merged into its base. One of virtual tokens cannot be merged, and stays beside it.

    Args:
        arguments: those of `from_pretrained`. As there, one that is a setting of the config, for example
            `activation_function`, changes the model's copy of the config.
    """
    config, arguments = apply_to_config(config, {"dtype": "float32", **arguments})
    built = {name: value for name, value in arguments.items() if name in BUILD_ARGUMENTS}
    with quiet():
        if not (source.random or source.adapter):
            model: PreTrainedModel = _from_checkpoint(source, config, arguments)
        else:
            model = _build_new(config, built) if source.random else _load_with_adapter(source, config, built)
            if arguments.keys() > built.keys():
                # Load it once more for arguments that act on loading, such as quantization.
                model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **arguments)
    # GPT-2's class sets no loss type. Without one, the Trainer counts T predictions in a sequence of T tokens, not
    # T - 1, and divides the loss by too much (transformers 5.23, `Trainer._get_num_items_in_batch`).
    model.loss_type = "ForCausalLM"
    return model


def apply_to_config(config: "PreTrainedConfig", arguments: dict[str, Any]) -> tuple["PreTrainedConfig", dict[str, Any]]:
    """Return a copy of the config that has the arguments that are its settings, and the other arguments."""
    settings = {}
    others = {}
    for name, value in arguments.items():
        if name not in BUILD_ARGUMENTS and hasattr(config, name):
            settings[name] = value
        else:
            others[name] = value
    config = copy.deepcopy(config)
    config.update(settings)
    return config, others


def _from_checkpoint(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    arguments = {"dtype": "float32", **arguments, "config": config, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(source.location, trust_remote_code=False, **arguments)


def _build_new(config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    """Build a model with new weights, drawn under a fixed seed, so that `random:gpt2` is one definite model."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        # Draw the weights in fp32 and cast them afterwards, so that they are the same numbers for each `dtype`.
        model = cast("Any", AutoModelForCausalLM).from_config(config, **{**arguments, "dtype": "float32"})
        return model.to(getattr(torch, arguments["dtype"]))


def _load_with_adapter(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    """Load the base model with the adapter merged into its weights, or with its virtual tokens before every text."""
    from peft import PeftModel

    base = load_model(base_of(source), config, **arguments)
    adapted = PeftModel.from_pretrained(base, source.location)
    if virtual_tokens(source):
        return adapted
    # PEFT froze the base; all of the merged model can be trained.
    return adapted.merge_and_unload().requires_grad_(True)


def count_parameters(model: "PreTrainedModel") -> tuple[int, int]:
    """Return the numbers of all parameters and of those that are trained.

    A quantized weight of bitsandbytes counts as the numbers that it stands for, not as the bytes that hold them. One
    that DeepSpeed has cut into shards, which is empty here, counts as the whole.
    """
    total = 0
    trainable = 0
    for parameter in model.parameters():
        quantized = getattr(parameter, "quant_state", None)
        count = getattr(parameter, "ds_shape", (quantized or parameter).shape).numel()
        total += count
        if parameter.requires_grad:
            trainable += count
    return total, trainable


def storage_type(model: "PreTrainedModel") -> str:
    """Return the type in which the weights are stored: `float32`, or `nf4 + float32` where some are quantized."""
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    quantized = sorted({str(state.quant_type) for state in states if state is not None})
    return " + ".join([*quantized, str(model.dtype).removeprefix("torch.")])


def save_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", source: ModelSource, form: str, folder: Path
) -> None:
    """Write a model into a folder from which it can be loaded again.

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
        for config in cast("Any", model).peft_config.values():
            # Name the base as a recipe does, and not by its folder in the cache.
            config.base_model_name_or_path = source.address.repository if source.address else source.name
            config.revision = (source.address and source.address.revision) or None
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
