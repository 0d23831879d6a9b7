"""What the program must know of a kind of causal language model, in one place for each kind."""

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
    positions_field: str  # how many tokens a sequence may have
    width_field: str  # C
    dropout_fields: tuple[str, ...]
    fused_activation: dict[str, str] = field(
        hash=False
    )  # config settings that take one kernel for the MLP's activation
    matrices: tuple[str, ...] = ()  # what adapters may change, by the last part of their names; the first by default
    matrices_are_transposed: bool = False  # stored (in, out), not (out, in) as `torch.nn.Linear` does
    scaled_outputs: tuple[str, ...] = ()  # matrices whose outputs (IA)³ scales
    scaled_inputs: tuple[str, ...] = ()  # and those whose inputs
    tied_weights: tuple[str, ...] = ()  # that a checkpoint need not have, being another tensor again

    def positions(self, config: Any) -> int:
        return int(getattr(config, self.positions_field))

    def width(self, config: Any) -> int:
        return int(getattr(config, self.width_field))
