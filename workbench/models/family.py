"""What the program must know of a kind of causal language model, in one place for each kind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelFamily:
    """The facts about one kind of model; `model_type` is what its config calls it.

    Names ending in `_class` are those of transformers, names ending in `_field` and `_fields` are the config's.
    """

    model_type: str
    title: str
    config_class: str
    model_class: str
    dropout_fields: tuple[str, ...]
    ranges: Mapping[str, tuple[float, float]] = field(hash=False)  # of numbers of the config, ends included
    # config settings that take one kernel for the MLP's activation
    fused_activation: dict[str, str] = field(hash=False)
    shortest_side: Callable[[Any, Iterable[str]], int]  # of the smallest of these matrices of a config
    matrices: tuple[str, ...] = ()  # what adapters may change, by the last part of their names; the first by default
    matrices_are_transposed: bool = False  # stored (in, out), not (out, in) as `torch.nn.Linear` does
    scaled_outputs: tuple[str, ...] = ()  # matrices whose outputs (IA)³ scales
    scaled_inputs: tuple[str, ...] = ()  # and those whose inputs
