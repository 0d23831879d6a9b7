"""Selective checkpointing (PyTorch: selective activation checkpoint): keep what is dear, recompute what is cheap."""

from dataclasses import dataclass
from typing import Any

from workbench.models.family import ModelFamily
from workbench.techniques.base import Call, Capability, Stage, Technique


def is_kept(_: Any, operation: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the result of an operation is kept; both passes give the same answer.

    Attention that draws its own dropout is computed again. If it were kept, its random numbers would not be drawn a
    second time, and every dropout after it would draw other numbers than in the forward pass.
    """
    name = operation.overloadpacket.__name__
    # `gemm_4bit` is bitsandbytes'; the others are PyTorch's
    if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "gemm_4bit"):
        return True
    argument_names = [argument.name for argument in operation._schema.arguments]
    arguments = dict(zip(argument_names, args, strict=False)) | kwargs
    return name.startswith("_scaled_dot_product_") and not arguments.get("dropout_p")


def checkpoint_selectively(model: Any) -> Any:
    """Let a model's blocks keep their inputs, matrix products and attention, and compute all else again."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    # transformers 5.23 renamed the method; 5.17 has only the older name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(is_kept)})
    model.config.use_cache = False
    return model


@dataclass(frozen=True)
class SelectiveCheckpointing(Technique):
    """Every transformer block keeps its matrix products and its attention, and computes the rest again.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198, had the idea
    of recomputing what is large and cheap; which operations those are is said here as in PyTorch's
    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. A GPT-2 block keeps 11 tensors of (B, T, C) instead
    of 28: its input, queries, keys and values, the attention's output, both projections and 4 of the MLP's first.
    They are kept beside autograd, where its hooks do not see them: activation offloading would leave them on the card.
    """

    stage = Stage.WRAP
    brings = frozenset({Capability.RECOMPUTATION})
    forbids = frozenset({Capability.KEY_VALUE_CACHE, Capability.RECOMPUTATION, Capability.OFFLOADED_ACTIVATIONS})

    def model(self, family: ModelFamily) -> Call:
        return Call(checkpoint_selectively)
