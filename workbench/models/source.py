"""What a model name means: embedded, a folder, the hub, or new weights from a config. Nothing is loaded here."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import ConfigurationError
from workbench.measure.emulated import EMULATED
from workbench.models.gpt2 import SIZES
from workbench.models.hub import require
from workbench.models.known import family_of
from workbench.paths import MODELS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

EMBEDDED = "gpt2-tiny"

RANDOM = "random:"


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `location` is a folder, or a hub id; `random` means config only, new weights."""

    name: str
    location: str
    random: bool
    adapter: bool = False


def resolve_auto(name: str, device_type: str) -> str:
    """`auto` becomes the name of a model, and a printed sentence says which and why."""
    if name != "auto":
        return name
    embedded = (EMBEDDED, "embedded, 2.8 M parameters, because this machine has no GPU")
    new = (f"{RANDOM}gpt2", "124 M new parameters: an emulated GPU computes nothing with weights")
    hub = ("gpt2", f"from the hub, 124 M parameters, because this machine has {device_type}")
    chosen, why = embedded if device_type == "cpu" else new if EMULATED else hub
    print(f"model: auto is {chosen} ({why})")
    return chosen


def locate(name: str) -> ModelSource:
    """Find out what a model name means, without loading weights.

    Raises:
        ConfigurationError: a name of no known form, or a folder without a model.
        UnavailableError: a hub model that is not in the cache, while the hub cannot be reached.
    """
    random, plain = name.startswith(RANDOM), name.removeprefix(RANDOM)
    if plain == EMBEDDED:
        return ModelSource(name, str(MODELS / EMBEDDED), random)
    if random and plain in SIZES:
        return ModelSource(name, plain, random)
    if plain and os.path.isdir(folder := os.path.expanduser(plain)):  # any text at all may be asked
        return _folder(name, Path(folder), random)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", plain):
        raise ConfigurationError(
            f"model: {name!r} is neither an existing folder nor a hub id. "
            f"Known without a download: {EMBEDDED}, {', '.join(RANDOM + size for size in SIZES)}."
        )
    require(plain, alternatives=f"{EMBEDDED} (embedded) or {RANDOM}gpt2 (no download)")
    return ModelSource(name, plain, random)


def _folder(name: str, folder: Path, random: bool) -> ModelSource:
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
    return ModelSource(name, str(folder.resolve()), random, adapter)


def _refuse_damaged(folder: Path) -> None:
    """Open each file of weights: its header says how long the file has to be."""
    from safetensors import SafetensorError, safe_open

    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy"):
                pass
        except SafetensorError as error:
            raise ConfigurationError(f"model: {path} is damaged or cut off ({error}). Copy or save it again.") from None


def locate_config(name: str) -> ModelSource:
    """Like `locate`, for a model of which only the config is needed: no weights, and none of the known sizes asked of
    the hub. Raises as `locate` does."""
    plain = name.removeprefix(RANDOM)
    if plain in SIZES:
        return ModelSource(name, plain, random=True)
    if plain and (Path(plain).expanduser() / "adapter_config.json").exists():
        return locate_config(str(base_of(locate(plain)).name))
    return replace(locate(RANDOM + plain), name=name)


def _adapter_config(source: ModelSource) -> Any:
    from peft import PeftConfig

    try:
        return PeftConfig.from_pretrained(source.location)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"model: the adapter_config.json of {source.name!r} cannot be read ({error}). Save the adapter again."
        ) from None


def base_of(source: ModelSource) -> ModelSource:
    base = locate(str(_adapter_config(source).base_model_name_or_path or ""))
    if base.adapter:
        raise ConfigurationError(f"model: the adapter {source.name!r} is for another adapter. Save it as 'merged'.")
    return base


def virtual_tokens(source: ModelSource) -> int:
    return getattr(_adapter_config(source), "num_virtual_tokens", None) or 0


def check_length(
    source: ModelSource, config: "PreTrainedConfig", sequence_length: int, taken: Mapping[str, int] | None = None
) -> None:
    """Raises ConfigurationError if the model has fewer positions than the sequences have tokens.

    Args:
        taken: positions that others need before each sequence, by their names.
    """
    taken = taken or {}
    positions = family_of(config, source.name).positions(config)
    room = positions - sum(taken.values())
    if sequence_length > room:
        others = "".join(f" with the {count} positions that {name} takes" for name, count in taken.items())
        cure = f"Use at most {room}." if room > 1 else "Take fewer of them."
        raise ConfigurationError(
            f"recipe: sequence_length {sequence_length}{others} is beyond the {positions} positions of "
            f"{source.name}. {cure}"
        )


def check_trainable(source: ModelSource) -> None:
    """Raises ConfigurationError for an adapter that cannot be merged into weights to go on from."""
    if source.adapter and (tokens := virtual_tokens(source)):
        raise ConfigurationError(
            f"model: {source.name!r} is an adapter of {tokens} virtual tokens, which cannot be merged into weights to "
            f"fine-tune. Start from its base, {base_of(source).name!r}."
        )


def check_vocabulary(source: ModelSource, config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerBase") -> None:
    """Raises ConfigurationError if the tokenizer can produce ids that the model has no embedding for."""
    if len(tokenizer) > config.vocab_size:
        raise ConfigurationError(
            f"model: {source.name} has embeddings for {config.vocab_size} tokens, but its tokenizer knows "
            f"{len(tokenizer)}. Save the tokenizer that belongs to the model into its folder."
        )


def check_sample(source: ModelSource, config: "PreTrainedConfig", prompt_tokens: int, new_tokens: int) -> None:
    """Raises ConfigurationError if a prompt and its continuation are longer than the model's positions."""
    positions = family_of(config, source.name).positions(config)
    if new_tokens < 0 or prompt_tokens + new_tokens > positions:
        raise ConfigurationError(
            f"sample_tokens must be between 0 and {max(positions - prompt_tokens, 0)}, got {new_tokens}: "
            f"{source.name} has {positions} positions, and the prompt takes {prompt_tokens} of them."
        )
