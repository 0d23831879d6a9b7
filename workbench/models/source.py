"""The meaning of a model's name: embedded, a folder, the hub, or new weights from a config. Nothing is loaded here."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workbench.base.device import current_emulated_gpu
from workbench.base.errors import ConfigurationError, WorkbenchError, explain_errors
from workbench.base.hub import Address, address_of
from workbench.base.paths import MODELS
from workbench.models.download import ADAPTER, CONFIGS, INDEX, READ, WHOLE, model_files
from workbench.models.family import positions
from workbench.models.known import PUBLISHED, check_kind

EMBEDDED = "gpt2-tiny"

RANDOM = "random:"
FLOATS = ("F64", "F32", "F16", "BF16")  # types of numbers in a file of safetensors
POINTER = b"version https://git-lfs"  # the beginning of a file of Git LFS that stands for the file itself
GPT2_POSITIONS = 1024  # transformers' default where a GPT-2's config says nothing
FOLDER_CURE = "Give the folder of a causal language model, as transformers' save_pretrained() writes it."
OF_OTHERS = {  # files that show what a folder without a config is instead
    "*.gguf": "a file of llama.cpp's, which is not read",
    "modules.json": "that of a sentence-transformers model, which makes vectors",
    "model_index.json": "that of a pipeline of diffusers, which makes pictures",
    "params.json": "that of weights in their maker's own form",
}


@dataclass(frozen=True)
class ModelSource:
    """The place that a model comes from.

    Attributes:
        name: the name that was typed.
        location: a folder, or the name of a published model of which only the config is known.
        random: only the config is used, with new weights.
        adapter: the folder has an adapter of PEFT's, and not a whole model.
        address: the address on the hub, if the folder is in its cache; else None.
    """

    name: str
    location: str
    random: bool
    adapter: bool = False
    address: Address | None = None


def resolve_auto(name: str, device_type: str) -> str:
    """Return the model that `auto` stands for on such a device, and print a sentence that says which and why.

    Any other name is returned as it is.
    """
    if name != "auto":
        return name
    if device_type == "cpu":
        chosen = EMBEDDED
        reason = "embedded, 2.8 M parameters, because this machine has no GPU"
    elif current_emulated_gpu():
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
    return _locate(name, random=name.startswith(RANDOM))


def _locate(name: str, random: bool) -> ModelSource:
    """Do the work of `locate`. `random`: no weights are asked for, whatever the name says."""
    plain = name.removeprefix(RANDOM)
    if plain == EMBEDDED:
        return ModelSource(name, str(MODELS / EMBEDDED), random)
    if random and plain in PUBLISHED:
        return ModelSource(name, plain, random)
    # `os.path` takes any text; `pathlib` would raise an error for some.
    folder = os.path.expanduser(plain)
    if plain and os.path.isdir(folder):
        _check_which(plain)
        return _source_in_folder(name, Path(folder), random, f"the folder {name!r}")
    if plain and os.path.exists(folder):
        raise ConfigurationError(f"model: {name!r} is {_kind_of_file(Path(folder))}. {FOLDER_CURE}")
    sizes = [RANDOM + size for size in PUBLISHED if "/" not in size]
    cure = f"Known without a download: {EMBEDDED}, {', '.join(sizes)}. Of the hub: owner/name, owner/name@revision."
    with explain_errors(f"model: {name!r:.90} is neither an existing folder nor a hub id", cure):
        address = address_of(plain, "model")
    if random and str(address) in PUBLISHED:
        return ModelSource(name, str(address), random)
    alternatives = f"{EMBEDDED} (embedded) or {RANDOM}gpt2 (no download)"
    folder_in_cache = model_files(address, alternatives, weights=not random, known_names=PUBLISHED)
    return replace(_source_in_folder(name, folder_in_cache, random, f"{name!r} on the hub"), address=address)


def _kind_of_file(path: Path) -> str:
    """Return what a file is that was given in the place of a model's folder."""
    for pattern, meaning in OF_OTHERS.items():
        if path.match(pattern):
            return meaning
    return "a file"


def _source_in_folder(name: str, folder: Path, random: bool, place: str) -> ModelSource:
    """Return the source of a model in a folder, after a check of its files.

    Args:
        name: the model's name, as it was typed.
        random: no weights are needed.
        place: the folder, for messages.

    Raises:
        ConfigurationError: a file is missing, cannot be read, or is damaged.
    """
    names = _list_files(folder, random)
    adapter = ADAPTER in names
    if not adapter and "config.json" not in names:
        raise ConfigurationError(f"model: {place} has no config.json. {_other_contents(folder)}")
    has_weights = any(file_name.endswith(".safetensors") for file_name in names)
    if not (adapter or random or has_weights):
        config: Any = None
        with suppress(ValueError, OSError):  # the message below does for a broken config too
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
    """Print that the folder is taken, if its name may be a model's on the hub too. `from_pretrained` takes it as well.

    Raises:
        ConfigurationError: the name is that of a size of GPT-2: recorded figures of these are of the hub's model.
    """
    if name in PUBLISHED and "/" not in name:
        raise ConfigurationError(
            f"model: {name!r} is GPT-2 on the hub, and a folder here. Write ./{name} for the "
            f"folder, or openai-community/{name} for the hub's."
        )
    if name[0] not in "./~\\" and name.count("/") < 2:
        print(f"model: {name} is the folder of that name here, not the hub's; ./{name} says so")


def _other_contents(folder: Path) -> str:
    """Return the cure for a folder that is no model's, by what is in it."""
    inner = sorted(path.parent for name in CONFIGS for path in folder.glob(f"*/{name}"))
    for pattern, meaning in OF_OTHERS.items():
        for path in sorted(folder.glob(pattern)):
            return f"{path.name} is {meaning}. Use a causal language model as transformers saves it."
    return f"One of its folders has: give {inner[-1]}" if inner else FOLDER_CURE


def _list_files(folder: Path, random: bool) -> set[str]:
    """Return the names of the files that loading may read, and check that it can.

    Args:
        random: weights are not read, so that they need no check.
    """
    cure = "Put the files themselves there, and give yourself the right to read them."
    with explain_errors(f"model: the folder {folder} cannot be used", cure):
        paths = [path for path in sorted(folder.iterdir()) if path.suffix in READ]
        for path in paths:
            if random and path.suffix == ".safetensors":
                continue
            # Only regular files: to read a pipe, for example, would never end.
            if not path.is_file() or not os.access(path, os.R_OK):
                raise ValueError(f"{path.name} is not a file that can be read")
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise ValueError(f"{path.name} only names a file of Git LFS: git lfs pull fetches it")
        return {path.name for path in paths}


def _refuse_damaged(folder: Path, names: set[str]) -> None:
    """Raise ConfigurationError for weights that are cut off, or an index that leads out of the folder."""
    from safetensors import safe_open

    cure = "Copy or save it again."
    for name in sorted(names):
        if name.endswith(".safetensors"):
            path = folder / name
            # Opening is enough to find a file that is cut off: the header says how long it has to be.
            with (
                explain_errors(f"model: {path} is damaged or cut off", cure),
                safe_open(path, framework="numpy") as file,
            ):
                for key in sorted(file.keys()):
                    _refuse_numbers(key, file.get_slice(key).get_dtype(), path)
    if INDEX in names and WHOLE not in names:
        with explain_errors(f"model: {folder / INDEX} does not fit its folder", cure):
            index = json.loads((folder / INDEX).read_text("utf-8"))
            elsewhere = set(index["weight_map"].values()) - names
            if elsewhere:
                raise ValueError(f"{min(elsewhere)!r} is not a file there")


def _refuse_numbers(name: str, number_type: str, path: Path) -> None:
    """Raise ConfigurationError for weights in integers or in 8 bits.

    `from_pretrained` would load them without the scales that belong to them.
    """
    if name.endswith("weight") and number_type not in FLOATS:
        raise ConfigurationError(
            f"model: {path} has {name!r} in {number_type}: these weights are quantized, and cannot "
            "be fine-tuned as they are. Use the model they were made of; the technique qlora "
            "quantizes it."
        )


def locate_config(name: str) -> ModelSource:
    """Find a model of which only the config is needed. For published sizes the hub is not asked.

    Raises as `locate` does.
    """
    plain = name.removeprefix(RANDOM)
    if plain in PUBLISHED:
        return ModelSource(name, plain, random=True)
    if plain and os.path.exists(os.path.join(os.path.expanduser(plain), ADAPTER)):
        return locate_config(base_of(locate(plain)).name)
    # The config is in the same place as for new weights, for which no weights are needed.
    return _locate(name, random=True)


def is_gpt2(name: str) -> bool:
    """Whether the name is a size of GPT-2, whose config and tokenizer come with the workbench, and no folder's."""
    return "/" not in name and name in PUBLISHED and not os.path.isdir(name)


def _adapter_config(source: ModelSource) -> Any:
    from peft import PeftConfig

    with explain_errors(f"model: the adapter_config.json of {source.name!r} cannot be read", "Save the adapter again."):
        return PeftConfig.from_pretrained(source.location)


def base_of(source: ModelSource) -> ModelSource:
    """Find the model that an adapter was trained beside. Raises as `locate` does, and for an adapter of an adapter."""
    config = _adapter_config(source)
    if not config.base_model_name_or_path:
        raise ConfigurationError(
            f"model: the adapter {source.name!r} does not name its base: base_model_name_or_path in its "
            'adapter_config.json is empty. Write the name of the model there, such as "gpt2".'
        )
    revision = f"@{config.revision}" if config.revision else ""
    try:
        base = locate(f"{config.base_model_name_or_path}{revision}")
    except WorkbenchError as error:
        raise type(error)(f"{error} It is the base that the adapter {source.name!r} names.") from None
    if base.adapter:
        raise ConfigurationError(f"model: the adapter {source.name!r} is for another adapter. Save it as 'merged'.")
    return base


def virtual_tokens(source: ModelSource) -> int:
    """Return the number of learned positions that an adapter puts before each text."""
    return getattr(_adapter_config(source), "num_virtual_tokens", None) or 0


def check_positions(name: str, available: int, sequence_length: int, taken: Mapping[str, int]) -> None:
    """Raise ConfigurationError if a model has fewer positions than the sequences need.

    Args:
        name: the model's name, for the message.
        available: the positions of the model.
        taken: the positions that techniques need before each sequence, by the techniques' names.
    """
    longest = available - sum(taken.values())
    if sequence_length > longest:
        others = "".join(f" with the {count} positions that {name} takes" for name, count in taken.items())
        cure = f"Use at most {longest}." if longest > 1 else "Take fewer of them."
        raise ConfigurationError(
            f"recipe: sequence_length {sequence_length}{others} is beyond the {available} positions of {name}. {cure}"
        )


def known_positions(name: str) -> int | None:
    """Return the positions of a model, if its config comes with the workbench or is in a folder. Needs no library.

    None: the hub would have to be asked.
    """
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
    """Raise ConfigurationError if a prompt and its continuation are longer than the model's positions."""
    available = positions(config)
    if new_tokens < 0 or prompt_tokens + new_tokens > available:
        raise ConfigurationError(
            f"sample_tokens must be between 0 and {max(available - prompt_tokens, 0)}, got "
            f"{new_tokens}: {source.name} has {available} positions, and the prompt takes "
            f"{prompt_tokens} of them."
        )
