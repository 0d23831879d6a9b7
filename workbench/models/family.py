"""What techniques must know of a kind of causal language model, read from a model of its config that has no memory."""

import re
from dataclasses import dataclass
from typing import Any

MOST_POSITIONS = 2**20  # the longest sequence of a recipe: where a model has no limit of its own
DROPOUT = re.compile(r"(?!classifier|summary|layer).*drop(out)?(_prob)?")
WRITTEN_OUT = "gelu_new"  # an activation that transformers computes step by step in Python
FUSED = "gelu_pytorch_tanh"  # the same formula as one kernel


@dataclass(frozen=True)
class ModelFamily:
    """The facts about one kind of model.

    Attributes:
        model_type: what its config calls it.
        dropout_fields: of the config.
        fused_activation: settings of the config that make the MLP's activation one kernel; empty if it is one already.
        matrices: what adapters may change, by the last part of their names, each with the shortest side that a matrix
            of this name has; the head is not among them.
        matrices_are_transposed: stored (in, out) as transformers' `Conv1D` does, not (out, in) as `torch.nn.Linear`.
    """

    model_type: str
    dropout_fields: tuple[str, ...]
    fused_activation: dict[str, str]
    matrices: dict[str, int]
    matrices_are_transposed: bool


_families: dict[str, ModelFamily] = {}  # by the whole config


def family_of(config: Any) -> ModelFamily:
    """The facts about the models of this config. The first time, a model is made of it on the meta device."""
    from torch.utils._python_dispatch import _disable_current_modes

    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _families:
        with _disable_current_modes():  # no tracker sees this model
            _families[key] = _read(config, on_meta(config))
    return _families[key]


def on_meta(config: Any) -> Any:
    """The model of a config on the meta device, where it takes no memory. Raises whatever is wrong with the config."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def positions(config: Any) -> int:
    """The most tokens that a sequence may have."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len"):  # the second is MPT's
        limit: int | None = getattr(text, name, None)
        if limit:
            return limit
    return MOST_POSITIONS


def dropout_fields(config: Any) -> tuple[str, ...]:
    """The names of the config's settings that are rates of dropout."""
    settings = vars(config.get_text_config()).items()
    return tuple(name for name, value in settings if DROPOUT.fullmatch(name) and isinstance(value, int | float))


def _read(config: Any, model: Any) -> ModelFamily:
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
