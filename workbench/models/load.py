"""A located model, its config and its tokenizer, loaded; and saved so that it can be loaded again."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import ConfigurationError, explained
from workbench.models.family import family_of, on_meta
from workbench.models.gpt2 import GPT2_TOKENS, gpt2_tokenizer
from workbench.models.known import PUBLISHED, check_kind, check_ranges
from workbench.models.source import EMBEDDED, ModelSource, base_of, locate, virtual_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BUILT = ("dtype", "attn_implementation")  # arguments of loading that a new model is made with just as well


def load_config(source: ModelSource) -> "PreTrainedConfig":
    """The model's config. Raises ConfigurationError if it is not a decoder's, or no model can be made with it."""
    from transformers import AutoConfig, PreTrainedConfig

    if source.adapter:
        return load_config(base_of(source))
    cure = "Correct it, or save config.json again with save_pretrained()."
    with explained(f"model: the config of {source.name!r} cannot be used", cure):
        if source.random and source.location in PUBLISHED:
            return AutoConfig.for_model(**PUBLISHED[source.location])
        check_kind(source.name, PreTrainedConfig.get_config_dict(source.location)[0])
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
        check_ranges(config)
        family_of(config)  # makes a model of it without memory
    return config


def check_trainable(source: ModelSource, config: "PreTrainedConfig") -> None:
    """Load the weights where they take no memory: their names and shapes have to be those of the config or base.

    Raises:
        ConfigurationError: they are not; transformers and PEFT would fill what is missing at random, and drop the rest.
            Or the source is an adapter that cannot be merged into weights to go on from.
    """
    import torch
    from peft import PeftModel

    if source.adapter and (tokens := virtual_tokens(source)):
        raise ConfigurationError(
            f"model: {source.name!r} is an adapter of {tokens} virtual tokens, which cannot be merged into weights to "
            f"fine-tune. Start from its base, {base_of(source).name!r}."
        )
    of = "base" if source.adapter else "config"
    cure = f"Copy or save weights and {of} again, together, with save_pretrained()."
    with quiet(), explained(f"model: the weights of {source.name!r} do not suit its {of}", cure):
        if source.adapter:
            check_trainable(base_of(source), config)
            with torch.device("meta"):
                model = PeftModel.from_pretrained(on_meta(config), source.location, low_cpu_mem_usage=True)
                # again, for its report
                _compare(model.load_adapter(source.location, "default", low_cpu_mem_usage=True)._asdict())
        elif not source.random:
            more = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
            _compare(_from_checkpoint(source, config, more)[1])


def _compare(report: dict[str, Any]) -> None:
    """Raises ValueError if weights are missing, too many, or of other shapes."""
    unexpected = {name for name in report["unexpected_keys"] if not name.endswith(".attn.masked_bias")}  # in old files
    found = [f"{name!r} is missing" for name in sorted(report["missing_keys"])]
    found += [f"{name!r} is too much" for name in sorted(unexpected)]
    for name, has, wanted in sorted(report.get("mismatched_keys", ())):
        found.append(f"{name!r} has the shape {[*has]}, not {[*wanted]}")
    if found:
        raise ValueError(f"{found[0]}; {len(found)} such")


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer; where it brings none, an embedded one: GPT-2's, or gpt2-tiny's for a small vocabulary."""
    from transformers import AutoTokenizer

    folder = Path(source.location)
    own = any((folder / name).exists() for name in ("tokenizer.json", "vocab.json"))
    if (source.random and source.location in PUBLISHED) or (folder.is_dir() and not own):
        few = PUBLISHED.get(source.location, {}).get("vocab_size", GPT2_TOKENS) < GPT2_TOKENS
        return load_tokenizer(locate(EMBEDDED)) if few else gpt2_tokenizer()
    cure = "Save it again with save_pretrained(), or delete tokenizer.json to use GPT-2's own."
    with explained(f"model: the tokenizer of {source.name!r} cannot be read", cure):
        return AutoTokenizer.from_pretrained(source.location, trust_remote_code=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the libraries' remarks and progress bars, which a user of the workbench can do nothing about."""
    import datasets
    from transformers.utils import logging as transformers_logging

    with ExitStack() as back, warnings.catch_warnings():
        back.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        transformers_logging.set_verbosity_error()
        for library, bars in ((transformers_logging, "progress_bar"), (datasets, "progress_bars")):
            if library.is_progress_bar_enabled():  # not where this stands inside another one of its kind
                back.callback(getattr(library, f"enable_{bars}"))
                getattr(library, f"disable_{bars}")()
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


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
            model: PreTrainedModel = _from_checkpoint(source, config, arguments)
        else:
            model = _new(config, built) if source.random else _with_adapter(source, config, built)
            if arguments.keys() > built.keys():
                # through `from_pretrained`, for arguments that act on loading, as quantization does
                model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **arguments)
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


def _from_checkpoint(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    arguments = {"dtype": "float32", **arguments, "config": config, "use_safetensors": True}
    return AutoModelForCausalLM.from_pretrained(source.location, trust_remote_code=False, **arguments)


def _new(config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    """New weights under a fixed seed, so that `random:gpt2` is one definite model, cast to `dtype` afterwards."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = cast("Any", AutoModelForCausalLM).from_config(config, **{**arguments, "dtype": "float32"})
        return made.to(getattr(torch, arguments["dtype"]))


def _with_adapter(source: ModelSource, config: "PreTrainedConfig", arguments: dict[str, Any]) -> Any:
    """The base model with the adapter merged into its weights, or with its virtual tokens before every text."""
    from peft import PeftModel

    base = load_model(base_of(source), config, **arguments)
    adapted = PeftModel.from_pretrained(base, source.location)
    if virtual_tokens(source):
        return adapted
    return adapted.merge_and_unload().requires_grad_(True)  # PEFT froze the base; the merged model may be trained again


def count_parameters(model: "PreTrainedModel") -> tuple[int, int]:
    """(all, trainable). A weight of bitsandbytes counts as the numbers it stands for, not as the bytes they are in."""
    numbers = [((getattr(p, "quant_state", None) or p).shape.numel(), p.requires_grad) for p in model.parameters()]
    return sum(count for count, _ in numbers), sum(count for count, trainable in numbers if trainable)


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
