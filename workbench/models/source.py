"""What a model name means: embedded, a folder, the hub, or new weights from a config. Nothing is loaded here."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.device import emulated
from workbench.base.errors import ConfigurationError, explained
from workbench.base.hub import Address, address_of
from workbench.base.paths import MODELS
from workbench.models.download import ADAPTER, CONFIGS, INDEX, READ, WHOLE, model_files
from workbench.models.family import positions
from workbench.models.known import PUBLISHED, check_kind

EMBEDDED = "gpt2-tiny"

RANDOM = "random:"
FLOATS = ("F64", "F32", "F16", "BF16")  # types of numbers in a file of safetensors
POINTER = b"version https://git-lfs"  # with which a file begins that stands for another
GPT2_POSITIONS = 1024  # what transformers takes where a config says nothing
OF_OTHERS = {  # files that tell what a folder without a config is
    "*.gguf": "a file of llama.cpp's, which is not read",
    "modules.json": "that of a sentence-transformers model, which makes vectors",
    "model_index.json": "that of a pipeline of diffusers, which makes pictures",
    "params.json": "that of weights in their maker's own form",
}


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        location: a folder, or the name of a published model of which only the config is known.
        random: config only, new weights.
        address: on the hub, if the folder is in its cache.
    """

    name: str
    location: str
    random: bool
    adapter: bool = False
    address: Address | None = None


def resolve_auto(name: str, device_type: str) -> str:
    """`auto` becomes the name of a model, and a printed sentence says which and why."""
    if name != "auto":
        return name
    if device_type == "cpu":
        chosen = EMBEDDED
        reason = "embedded, 2.8 M parameters, because this machine has no GPU"
    elif emulated():
        chosen = f"{RANDOM}gpt2"
        reason = "124 M new parameters: an emulated GPU computes nothing with weights"
    else:
        chosen = "gpt2"
        reason = f"from the hub, 124 M parameters, because this machine has {device_type}"
    print(f"model: auto is {chosen} ({reason})")
    return chosen


def locate(name: str) -> ModelSource:
    """Find out what a model name means, without loading weights.

    Raises:
        ConfigurationError: a name of no known form, or a folder without a model.
        UnavailableError: a hub model that is not in the cache, while the hub cannot be reached.
    """
    return _located(name, random=name.startswith(RANDOM))


def _located(name: str, random: bool) -> ModelSource:
    """Raises as `locate`, and calls the model by the `name` that was typed; `random`: no weights are asked for."""
    plain = name.removeprefix(RANDOM)
    if plain == EMBEDDED:
        return ModelSource(name, str(MODELS / EMBEDDED), random)
    if random and plain in PUBLISHED:
        return ModelSource(name, plain, random)
    # `os.path` takes any text at all, which `pathlib` does not
    folder = os.path.expanduser(plain)
    if plain and os.path.isdir(folder):
        _check_which(plain)
        return _folder(name, Path(folder), random, f"the folder {name!r}")
    sizes = [RANDOM + size for size in PUBLISHED if "/" not in size]
    cure = f"Known without a download: {EMBEDDED}, {', '.join(sizes)}. Of the hub: owner/name, owner/name@revision."
    with explained(f"model: {name!r:.90} is neither an existing folder nor a hub id", cure):
        address = address_of(plain, "model")
    if random and str(address) in PUBLISHED:
        return ModelSource(name, str(address), random)
    alternatives = f"{EMBEDDED} (embedded) or {RANDOM}gpt2 (no download)"
    folder_in_cache = model_files(address, alternatives, weights=not random, known_names=PUBLISHED)
    return replace(_folder(name, folder_in_cache, random, f"{name!r} on the hub"), address=address)


def _folder(name: str, folder: Path, random: bool, place: str) -> ModelSource:
    names = _readable(folder, random)
    adapter = ADAPTER in names
    if not adapter and "config.json" not in names:
        raise ConfigurationError(f"model: {place} has no config.json. {_other_contents(folder)}")
    has_weights = any(file_name.endswith(".safetensors") for file_name in names)
    if not (adapter or random or has_weights):
        config: Any = None
        with suppress(ValueError, OSError):  # what is wrong with it is said when it is read
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict) and isinstance(config.get("model_type"), str):
            check_kind(name, config)
        raise ConfigurationError(
            f"model: {place} has no *.safetensors weights. Save them with save_pretrained(), "
            f"or train from new weights with {RANDOM}{name}."
        )
    if adapter and "adapter_model.safetensors" not in names:
        raise ConfigurationError(
            f"model: the adapter {name!r} has no adapter_model.safetensors; pickled ones are not read. Save it again."
        )
    if not random:
        _refuse_damaged(folder, names)
    return ModelSource(name, str(folder.resolve()), random, adapter)


def _check_which(name: str) -> None:
    """A folder whose name may be a model's on the hub, too, is taken, as `from_pretrained` does; a line says so.

    Raises:
        ConfigurationError: the name is that of a size of GPT-2: what is known and recorded of these is the hub's.
    """
    if name in PUBLISHED and "/" not in name:
        raise ConfigurationError(
            f"model: {name!r} is GPT-2 on the hub, and a folder here. Write ./{name} for the "
            f"folder, or openai-community/{name} for the hub's."
        )
    if name[0] not in "./~\\" and name.count("/") < 2:
        print(f"model: {name} is the folder of that name here, not the hub's; ./{name} says so")


def _other_contents(folder: Path) -> str:
    """The cure for a folder that is no model's, by what is in it."""
    inner = sorted(path.parent for name in CONFIGS for path in folder.glob(f"*/{name}"))
    for pattern, meaning in OF_OTHERS.items():
        for path in sorted(folder.glob(pattern)):
            return f"{path.name} is {meaning}. Use a causal language model as transformers saves it."
    return f"One of its folders has: give {inner[-1]}" if inner else "Give the folder of a saved model."


def _readable(folder: Path, random: bool) -> set[str]:
    """The names of the files that loading looks for; of new weights none is read."""
    cure = "Put the files themselves there, and give yourself the right to read them."
    with explained(f"model: the folder {folder} cannot be used", cure):
        paths = [path for path in sorted(folder.iterdir()) if path.suffix in READ]
        for path in paths:
            if random and path.suffix == ".safetensors":
                continue
            # a pipe, for example, would never end
            if not path.is_file() or not os.access(path, os.R_OK):
                raise ValueError(f"{path.name} is not a file that can be read")
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise ValueError(f"{path.name} only names a file of Git LFS: git lfs pull fetches it")
        return {path.name for path in paths}


def _refuse_damaged(folder: Path, names: set[str]) -> None:
    """Raises ConfigurationError for weights that are cut off, or an index that leads out of the folder."""
    from safetensors import safe_open

    cure = "Copy or save it again."
    for name in sorted(names):
        if name.endswith(".safetensors"):
            path = folder / name
            # opening is enough: the header says how long the file has to be
            with explained(f"model: {path} is damaged or cut off", cure), safe_open(path, framework="numpy") as file:
                for key in sorted(file.keys()):
                    _refuse_numbers(key, file.get_slice(key).get_dtype(), path)
    if INDEX in names and WHOLE not in names:
        with explained(f"model: {folder / INDEX} does not fit its folder", cure):
            index = json.loads((folder / INDEX).read_text("utf-8"))
            elsewhere = set(index["weight_map"].values()) - names
            if elsewhere:
                raise ValueError(f"{min(elsewhere)!r} is not a file there")


def _refuse_numbers(name: str, number_type: str, path: Path) -> None:
    """Raises ConfigurationError for weights in integers or in 8 bits, which `from_pretrained` takes for what they say
    without the scales that belong to them."""
    if name.endswith("weight") and number_type not in FLOATS:
        raise ConfigurationError(
            f"model: {path} has {name!r} in {number_type}: these weights are quantized, and cannot "
            "be fine-tuned as they are. Use the model they were made of; the technique qlora "
            "quantizes it."
        )


def locate_config(name: str) -> ModelSource:
    """Like `locate`, for a model of which only the config is needed: no weights, and the hub is asked for none of the
    published sizes. Raises as `locate` does."""
    plain = name.removeprefix(RANDOM)
    if plain in PUBLISHED:
        return ModelSource(name, plain, random=True)
    if plain and os.path.exists(os.path.join(os.path.expanduser(plain), ADAPTER)):
        return locate_config(base_of(locate(plain)).name)
    # that of a model with new weights is looked for in the same place, and no weights are asked for
    return _located(name, random=True)


def is_gpt2(name: str) -> bool:
    """It is a size of GPT-2, whose config and tokenizer come with the workbench, and no folder of that name."""
    return "/" not in name and name in PUBLISHED and not os.path.isdir(name)


def _adapter_config(source: ModelSource) -> Any:
    from peft import PeftConfig

    with explained(f"model: the adapter_config.json of {source.name!r} cannot be read", "Save the adapter again."):
        return PeftConfig.from_pretrained(source.location)


def base_of(source: ModelSource) -> ModelSource:
    """The model that an adapter was trained beside. Raises as `locate` does, and for an adapter of an adapter."""
    config = _adapter_config(source)
    revision = f"@{config.revision}" if config.revision else ""
    base = locate(f"{config.base_model_name_or_path or ''}{revision}")
    if base.adapter:
        raise ConfigurationError(f"model: the adapter {source.name!r} is for another adapter. Save it as 'merged'.")
    return base


def virtual_tokens(source: ModelSource) -> int:
    """How many learned positions an adapter puts before each text."""
    return getattr(_adapter_config(source), "num_virtual_tokens", None) or 0


def check_positions(name: str, available: int, sequence_length: int, taken: Mapping[str, int]) -> None:
    """Raises ConfigurationError if a model has fewer positions than the sequences have tokens.

    Args:
        available: positions of the model.
        taken: those that techniques need before each sequence, by their names.
    """
    longest = available - sum(taken.values())
    if sequence_length > longest:
        others = "".join(f" with the {count} positions that {name} takes" for name, count in taken.items())
        cure = f"Use at most {longest}." if longest > 1 else "Take fewer of them."
        raise ConfigurationError(
            f"recipe: sequence_length {sequence_length}{others} is beyond the {available} positions of {name}. {cure}"
        )


def known_positions(name: str) -> int | None:
    """How many positions a model has, as its config says that is known or lies here; None: the hub would have to be
    asked. Needs no library."""
    plain = name.removeprefix(RANDOM)
    folder = str(MODELS / EMBEDDED) if plain == EMBEDDED else os.path.expanduser(plain)
    config = PUBLISHED.get(plain, {})
    if not config and os.path.isfile(os.path.join(folder, "config.json")):
        with suppress(ValueError, OSError):
            config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    default = GPT2_POSITIONS if config.get("model_type") == "gpt2" else None
    count: int | None = config.get("n_positions", config.get("max_position_embeddings", default))
    return count


def check_sample(source: ModelSource, config: Any, prompt_tokens: int, new_tokens: int) -> None:
    """Raises ConfigurationError if a prompt and its continuation are longer than the model's positions."""
    available = positions(config)
    if new_tokens < 0 or prompt_tokens + new_tokens > available:
        raise ConfigurationError(
            f"sample_tokens must be between 0 and {max(available - prompt_tokens, 0)}, got "
            f"{new_tokens}: {source.name} has {available} positions, and the prompt takes "
            f"{prompt_tokens} of them."
        )
