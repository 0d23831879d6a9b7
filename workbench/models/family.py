"""Facts about a kind of causal language model that techniques need, read from a model on the meta device."""

import re
from dataclasses import dataclass
from typing import Any

MOST_POSITIONS = 2**20  # tokens in the longest sequence of a recipe, for models that have no limit themselves
# The names of settings that are rates of dropout: in the model itself, not in its classifier or summary, and not the
# rate at which whole layers are left out.
DROPOUT = re.compile(r"(?!classifier|summary|layer).*drop(out)?(_prob)?")
WRITTEN_OUT = "gelu_new"  # an activation that transformers computes step by step in Python
FUSED = "gelu_pytorch_tanh"  # one kernel for the same formula


@dataclass(frozen=True)
class ModelFamily:
    """The facts about one kind of model.

    Attributes:
        model_type: the name of the kind in its config.
        dropout_fields: the names of the config's settings that are rates of dropout.
        fused_activation: settings of the config that make the MLP's activation one kernel; empty if it is one already.
        matrices: the matrices that adapters may change, without the head. The key is the last part of a matrix's name,
            the value the shortest side of all matrices of this name.
        matrices_are_transposed: they are stored (in, out), as `Conv1D` of transformers does, and not (out, in), as
            `torch.nn.Linear` does.
    """

    model_type: str
    dropout_fields: tuple[str, ...]
    fused_activation: dict[str, str]
    matrices: dict[str, int]
    matrices_are_transposed: bool


_families: dict[str, ModelFamily] = {}  # the key is the whole config as JSON


def family_of(config: Any) -> ModelFamily:
    """Return the facts about the models of a config. The first time, such a model is built on the meta device."""
    from torch.utils._python_dispatch import _disable_current_modes

    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _families:
        with _disable_current_modes():  # no tracker counts this model
            _families[key] = _read_family(config, on_meta(config))
    return _families[key]


def on_meta(config: Any) -> Any:
    """Build the model of a config on the meta device, where it takes no memory.

    Raises whatever transformers raises if something is wrong with the config.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def positions(config: Any) -> int:
    """Return the largest number of tokens that a sequence may have in such a model."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):  # MPT has the second name
        limit: int | None = getattr(text, name, None)
        if limit:
            return limit
    return MOST_POSITIONS


def dropout_fields(config: Any) -> tuple[str, ...]:
    """Return the names of the config's settings that are rates of dropout."""
    settings = vars(config.get_text_config()).items()
    return tuple(name for name, value in settings if DROPOUT.fullmatch(name) and isinstance(value, int | float))


def _read_family(config: Any, model: Any) -> ModelFamily:
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    matrices: dict[str, int] = {}
    transposed = False
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head:
            last_part = name.rpartition(".")[2]
            matrices[last_part] = min(matrices.get(last_part, MOST_POSITIONS), *module.weight.shape)
            transposed = transposed or isinstance(module, Conv1D)
    settings = vars(config.get_text_config())
    return ModelFamily(
        model_type=config.model_type,
        dropout_fields=dropout_fields(config),
        fused_activation={name: FUSED for name, value in settings.items() if value == WRITTEN_OUT},
        matrices=dict(sorted(matrices.items())),
        matrices_are_transposed=transposed,
    )
