"""GPT-2 by one name everywhere: embedded, from the hub, from a folder, or with random weights from its config."""

import copy
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from workbench.errors import ConfigurationError
from workbench.hub import require
from workbench.locations import MODELS

if TYPE_CHECKING:
    import torch
    from transformers import GPT2Config, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "gpt2-tiny"
RANDOM = "random:"
END_OF_TEXT = "<|endoftext|>"
BUILT = ("dtype", "attn_implementation")  # arguments of loading that a new model is made with just as well

# Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); 12 heads of 64 in the smallest
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}


@dataclass(frozen=True)
class Source:
    """Where a model comes from. `location` is a folder, or a hub id; `random` means config only, new weights."""

    name: str
    location: str
    random: bool
    adapter: bool = False


def resolve(name: str, device_type: str) -> str:
    """`auto` becomes the name of a model, and a printed sentence says which and why."""
    if name != "auto":
        return name
    chosen, why = {
        "cpu": (EMBEDDED, "embedded, 2.8 M parameters, because this machine has no GPU"),
    }.get(device_type, ("gpt2", f"from the hub, 124 M parameters, because this machine has {device_type}"))
    print(f"model: auto is {chosen} ({why})")
    return chosen


def locate(name: str) -> Source:
    """Find out what a model name means, without loading weights.

    Raises:
        ConfigurationError: a name of no known form, or a folder without a model.
        UnavailableError: a hub model that is not in the cache, while the hub cannot be reached.
    """
    random, plain = name.startswith(RANDOM), name.removeprefix(RANDOM)
    if plain == EMBEDDED:
        return Source(name, str(MODELS / EMBEDDED), random)
    if random and plain in SIZES:
        return Source(name, plain, random)
    if plain and os.path.isdir(folder := os.path.expanduser(plain)):  # any text at all may be asked
        return _folder(name, Path(folder), random)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", plain):
        raise ConfigurationError(
            f"model: {name!r} is neither an existing folder nor a hub id. "
            f"Known without a download: {EMBEDDED}, {', '.join(RANDOM + size for size in SIZES)}."
        )
    require(plain, alternatives=f"{EMBEDDED} (embedded) or {RANDOM}gpt2 (no download)")
    return Source(name, plain, random)


def _folder(name: str, folder: Path, random: bool) -> Source:
    adapter = (folder / "adapter_config.json").exists()
    if not adapter and not (folder / "config.json").exists():
        raise ConfigurationError(f"model: the folder {name!r} has no config.json. Give the folder of a saved GPT-2.")
    if not adapter and not random and not list(folder.glob("*.safetensors")):
        raise ConfigurationError(
            f"model: the folder {name!r} has no *.safetensors weights. Save them with save_pretrained(), "
            f"or train from new weights with {RANDOM}{name}."
        )
    if adapter and not (folder / "adapter_model.safetensors").exists():
        raise ConfigurationError(
            f"model: the adapter {name!r} has no adapter_model.safetensors; pickled weights are not read. Save it "
            "again with save_pretrained()."
        )
    if not random:
        _refuse_damaged(folder)
    return Source(name, str(folder.resolve()), random, adapter)


def _refuse_damaged(folder: Path) -> None:
    """Open each file of weights: its header says how long the file has to be."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ConfigurationError(f"model: {path} is damaged or cut off ({error}). Copy or save it again.") from None


def load_config(source: Source) -> "GPT2Config":
    """The model's config. Raises ConfigurationError if it is not a GPT-2."""
    from transformers import AutoConfig, GPT2Config

    if source.random and source.location in SIZES:
        return GPT2Config(**SIZES[source.location])
    if source.adapter:
        return load_config(_base(source))
    try:
        config: GPT2Config = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"model: the config of {source.name!r} cannot be read: {error}") from None
    if config.model_type != "gpt2":
        raise ConfigurationError(f"model: {source.name!r} is a {config.model_type!r}; the workbench trains GPT-2 only.")
    return config


def learning_rate(config: "GPT2Config") -> float:
    """The customary rate of full fine-tuning: the Trainer's default, and for models narrower than GPT-2 the rate that
    was best for the embedded one (of 0.0005, 0.001 and 0.002, after 30 steps on Shakespeare)."""
    return 5e-5 if config.n_embd >= SIZES["gpt2"]["n_embd"] else 1e-3


def check_length(
    source: Source, config: "GPT2Config", sequence_length: int, taken: Mapping[str, int] | None = None
) -> None:
    """Raises ConfigurationError if the model has fewer positions than the sequences have tokens.

    Args:
        taken: positions that others need before each sequence, by their names.
    """
    taken = taken or {}
    room = config.n_positions - sum(taken.values())
    if sequence_length > room:
        others = "".join(f" with the {count} positions that {name} takes" for name, count in taken.items())
        cure = f"Use at most {room}." if room > 1 else "Take fewer of them."
        raise ConfigurationError(
            f"recipe: sequence_length {sequence_length}{others} is beyond the {config.n_positions} positions of "
            f"{source.name}. {cure}"
        )


def check_trainable(source: Source) -> None:
    """Raises ConfigurationError for an adapter that cannot be merged into weights to go on from."""
    if source.adapter and (tokens := _virtual_tokens(source)):
        raise ConfigurationError(
            f"model: {source.name!r} is an adapter of {tokens} virtual tokens, which cannot be merged into weights to "
            f"fine-tune. Start from its base, {_base(source).name!r}."
        )


def check_vocabulary(source: Source, config: "GPT2Config", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ConfigurationError if the tokenizer can produce ids that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise ConfigurationError(
            f"model: {source.name} has embeddings for {config.vocab_size} tokens, but its tokenizer knows "
            f"{len(tokenizer)}. Save the tokenizer that belongs to the model into its folder."
        )


def check_sample(source: Source, config: "GPT2Config", prompt_tokens: int, new_tokens: int) -> None:
    """Raises ConfigurationError if a prompt and its continuation are longer than the model's positions."""
    if new_tokens < 0 or prompt_tokens + new_tokens > config.n_positions:
        raise ConfigurationError(
            f"sample_tokens must be between 0 and {max(config.n_positions - prompt_tokens, 0)}, got {new_tokens}: "
            f"{source.name} has {config.n_positions} positions, and the prompt takes {prompt_tokens} of them."
        )


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
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


@cache
def gpt2_tokenizer() -> "PreTrainedTokenizerBase":
    """GPT-2's 50,257-token byte-level BPE, rebuilt from its merges: 256 bytes, then one token per merge, then the end.

    Source of the merges and of the order of the bytes: `data/models/gpt2/SOURCE.md`.
    """
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    lines = (MODELS / "gpt2" / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [(left, right) for left, right in (line.split(" ") for line in lines if not line.startswith("#version"))]
    # the alphabet in the order of GPT-2's `bytes_to_unicode`: printable bytes first, then the others as U+0100…
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(left + right for left, right in merges), END_OF_TEXT]
    bpe = ByteLevelBPETokenizer({token: i for i, token in enumerate(tokens)}, merges)
    bpe.add_special_tokens([END_OF_TEXT])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT,
        model_max_length=1024,
    )  # fmt: skip
    if len(tokenizer) != 50257:
        raise ConfigurationError(
            f"GPT-2's vocabulary has {len(tokenizer)} entries instead of 50,257: merges.txt is damaged."
        )
    return tokenizer


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


def load(source: Source, config: "GPT2Config", **arguments: Any) -> "PreTrainedModel":
    """The model, in fp32 unless `dtype` says otherwise, on the CPU unless `device_map` says otherwise.

    An adapter is merged into its base; one of virtual tokens cannot be, and stays beside it. As with `from_pretrained`,
    an argument that is a setting of the config, for example `activation_function`, changes it; the config given stays
    as it is.
    """
    config, arguments = _settled(config, {"dtype": "float32", **arguments})
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


def _settled(config: "GPT2Config", arguments: dict[str, Any]) -> tuple["GPT2Config", dict[str, Any]]:
    """A copy of the config with those arguments that are settings of it, and the other arguments."""
    settings = {name: value for name, value in arguments.items() if name not in BUILT and hasattr(config, name)}
    config = copy.deepcopy(config)
    config.update(settings)
    return config, {name: value for name, value in arguments.items() if name not in settings}


def _loaded_again(
    model: "PreTrainedModel", source: Source, config: "GPT2Config", arguments: dict[str, Any]
) -> "PreTrainedModel":
    """The same weights through `from_pretrained`, for arguments that act on loading, as quantization does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return _from_checkpoint(replace(source, location=folder), config, arguments)


def _from_checkpoint(source: Source, config: "GPT2Config", arguments: dict[str, Any]) -> "PreTrainedModel":
    """The saved weights, all of them: transformers would fill a missing layer with random ones."""
    from transformers import GPT2LMHeadModel

    load = cast("Any", GPT2LMHeadModel.from_pretrained)  # its annotation forgets the second result
    model: PreTrainedModel
    arguments = {**arguments, "config": config, "use_safetensors": True, "output_loading_info": True}
    try:
        model, report = load(source.location, **arguments)
    except OSError as error:
        raise ConfigurationError(f"model: the weights of {source.name!r} cannot be had: {error}") from None
    missing = sorted(set(report["missing_keys"]) - {"lm_head.weight"})  # which is the embedding again
    if missing:
        raise ConfigurationError(
            f"model: the checkpoint of {source.name!r} has no weights for {missing[0]!r} ({len(missing)} are missing). "
            "Save it again, whole, with save_pretrained()."
        )
    return model


def _new(config: "GPT2Config", arguments: dict[str, Any]) -> "PreTrainedModel":
    """New weights under a fixed seed, so that `random:gpt2` is one definite model, cast to `dtype` afterwards."""
    import torch
    from transformers import GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = cast("Any", GPT2LMHeadModel)._from_config(config, **{**arguments, "dtype": "float32"})
        model: PreTrainedModel = made.to(getattr(torch, arguments["dtype"]))
    return model


def locate_config(name: str) -> Source:
    """Like `locate`, for a model of which only the config is needed: no weights, and none of the known sizes asked of
    the hub. Raises as `locate` does."""
    plain = name.removeprefix(RANDOM)
    if plain in SIZES:
        return Source(name, plain, random=True)
    if plain and (Path(plain).expanduser() / "adapter_config.json").exists():
        return locate_config(str(_base(locate(plain)).name))
    return replace(locate(RANDOM + plain), name=name)


def skeleton(config: "GPT2Config", **arguments: Any) -> "PreTrainedModel":
    """The model on the meta device: shapes and types, no memory.

    Args:
        arguments: of `from_pretrained`: `dtype`, `attn_implementation` and settings of the config.

    Raises:
        ConfigurationError: another argument, whose effect on loading would be missed.
    """
    import torch
    from transformers import GPT2LMHeadModel

    config, arguments = _settled(config, {"dtype": "float32", **arguments})
    if missed := sorted(set(arguments) - set(BUILT)):
        raise ConfigurationError(
            f"predict: {missed[0]} acts while weights are loaded, which a prediction does not do. "
            "Measure this recipe with `run`, or give the technique that asks for it a `stand_in`."
        )
    with quiet(), torch.device("meta"):
        model: PreTrainedModel = cast("Any", GPT2LMHeadModel)._from_config(config, **arguments)
    model.loss_type = "ForCausalLM"  # as `load` sets it
    return model


def _adapter_config(source: Source) -> Any:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(source.location)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"model: the adapter_config.json of {source.name!r} cannot be read ({error}). Save the adapter again."
        ) from None


def _base(source: Source) -> Source:
    base = locate(str(_adapter_config(source).base_model_name_or_path or ""))
    if base.adapter:
        raise ConfigurationError(f"model: the adapter {source.name!r} is for another adapter. Save it as 'merged'.")
    return base


def _virtual_tokens(source: Source) -> int:
    return getattr(_adapter_config(source), "num_virtual_tokens", None) or 0


def _with_adapter(source: Source, config: "GPT2Config", arguments: dict[str, Any]) -> "PreTrainedModel":
    """The base model with the adapter merged into its weights, or with its virtual tokens before every text."""
    from peft import PeftModel

    base = load(_base(source), config, **arguments)
    adapted = PeftModel.from_pretrained(base, source.location)
    if _virtual_tokens(source):
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


def save(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", source: Source, form: str, folder: Path
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


def generate(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: str, tokens: int) -> str:
    """Continue a prompt, sampled at temperature 0.8 from the 50 likeliest tokens under a fixed seed."""
    import torch

    device = next(model.parameters()).device
    inputs = tokenizer(prompt, return_tensors="pt").to(device)
    prompt_tokens, positions = inputs["input_ids"].shape[1], model.config.n_positions
    if adapter := getattr(model, "active_peft_config", None):
        prompt_tokens += getattr(adapter, "num_virtual_tokens", None) or 0
    if prompt_tokens + tokens > positions:
        raise ConfigurationError(
            f"generate: {prompt_tokens} + {tokens} tokens are beyond the model's {positions} positions."
        )
    training, cache_was = model.training, model.config.use_cache
    with quiet(), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model.eval()
        model.config.use_cache = True
        out = cast("Any", model).generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, temperature=0.8, top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    model.train(training)
    model.config.use_cache = cache_was
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
