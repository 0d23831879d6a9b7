"""Gradient checkpointing (PyTorch: activation checkpointing): recompute activations instead of keeping them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.measure.categories import Category
from workbench.settings import setting
from workbench.techniques.base import Capability, Fragment, Numerics, Technique

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GradientCheckpointing(Technique):
    """Keeps only the input of every n-th transformer block and runs those blocks again during the backward pass.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. A key-value cache cannot be kept,
    since the recomputation would fill it a second time.
    """

    every_n_layers: int = setting(1, "checkpoint every n-th transformer block; 1 is all of them", minimum=1)
    use_reentrant: bool = setting(False, "PyTorch's older implementation, which recomputes under a fresh graph")

    name: ClassVar[str] = "gradient_checkpointing"
    title: ClassVar[str] = "Gradient checkpointing"
    attacks: ClassVar[tuple[Category, ...]] = (Category.ACTIVATIONS,)
    costs: ClassVar[str] = "about one more forward pass per step"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    forbids: ClassVar[frozenset[Capability]] = frozenset({Capability.KEY_VALUE_CACHE})

    @classmethod
    def variants(cls, compute_capability: tuple[int, int] | None) -> tuple[Technique, ...]:
        return tuple(cls(every_n_layers=n) for n in (4, 2, 1))

    def model(self, model: "PreTrainedModel") -> "PreTrainedModel":
        # transformers 5.23 renamed the method; 5.17 has only the older name
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": self.use_reentrant})
        model.config.use_cache = False
        if self.use_reentrant:
            # a reentrant block drops its gradient if no input requires one, as with frozen embeddings
            model.enable_input_require_grads()
        layers: list[Any] = [m for m in model.modules() if hasattr(m, "gradient_checkpointing") and hasattr(m, "attn")]
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = index % self.every_n_layers == 0
        return model

    def script(self) -> Fragment:
        every = f", every_n_layers={self.every_n_layers}" if self.every_n_layers > 1 else ""
        kwargs = f'{{"use_reentrant": {self.use_reentrant}}}'
        lines = [f"model.activation_checkpointing_enable({kwargs}{every})", "model.config.use_cache = False"]
        return Fragment(model=(*lines, *(["model.enable_input_require_grads()"] if self.use_reentrant else [])))
