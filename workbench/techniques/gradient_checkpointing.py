"""Gradient checkpointing (PyTorch: activation checkpointing): recompute activations instead of keeping them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.base.device import Device
from workbench.base.settings import setting
from workbench.models.family import ModelFamily
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


def checkpoint_blocks(model: Any, every_n_layers: int, use_reentrant: bool, offload: bool) -> Any:
    """Let a model keep only the input of every n-th transformer block and run these blocks again; return the model.

    Args:
        offload: the inputs wait in host memory.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    # transformers 5.23 renamed the method; 5.17 has only the older name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    offloading = {"offload": True} if offload else {}  # an older transformers has no such argument
    enable({"use_reentrant": use_reentrant}, **offloading)
    model.config.use_cache = False
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for index, block in enumerate(blocks):
        block.gradient_checkpointing = index % every_n_layers == 0
    return model


def checkpoint_to_nowhere(model: Any, every_n_layers: int, use_reentrant: bool, offload: bool) -> Any:
    """Do the work of `checkpoint_blocks` with `offload` for a prediction, in which the host's memory does not count.

    An input that is saved takes nothing, and a new, contiguous tensor comes back. That is how PyTorch's `save_on_cpu`
    allocates on the device, in which transformers wraps the checkpoint of a block.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    def bring_back(saved: tuple[Any, Any]) -> Any:
        shape, dtype = saved
        return torch.empty(shape, dtype=dtype)

    def with_hooks(checkpoint: Any) -> Any:
        def save_nowhere(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(lambda saved: (saved.size(), saved.dtype), bring_back):
                return checkpoint(*args, **kwargs)

        return save_nowhere

    model = checkpoint_blocks(model, every_n_layers, use_reentrant, offload=False)
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = with_hooks(module._gradient_checkpointing_func)
    return model


@dataclass(frozen=True)
class GradientCheckpointing(Technique):
    """Every n-th transformer block keeps only its input; the backward pass runs those blocks again.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174. A key-value cache cannot be kept,
    since the recomputation would fill it a second time. With `offload` the inputs wait in page-locked host memory, by
    transformers' own use of `torch.autograd.graph.save_on_cpu`. Computation waits for the copies, and no record counts
    them.
    """

    every_n_layers: int = setting(1, "checkpoint every n-th transformer block; 1 is all of them", minimum=1)
    use_reentrant: bool = setting(False, "PyTorch's older implementation, which recomputes under a fresh graph")
    offload: bool = setting(False, "on CUDA: what is kept waits in host memory")

    stage = Stage.WRAP
    brings = frozenset({Capability.RECOMPUTATION})
    forbids = frozenset({Capability.KEY_VALUE_CACHE, Capability.RECOMPUTATION})
    worth_trying = tuple({"every_n_layers": n} for n in (4, 2, 1))

    def missing(self, device: Device) -> str | None:
        if self.offload and device.kind != "cuda":
            return (
                f"{self.name}=offload:true needs a CUDA device; a {device.kind}'s memory is the host's. Leave it out."
            )
        return None

    def model(self, family: ModelFamily) -> Call:
        return Call(checkpoint_blocks, self.settings())

    def switches(self) -> Arguments:
        # A dataclass keeps the defaults of its fields as class attributes.
        changed = {name: value for name, value in self.settings().items() if value != getattr(type(self), name)}
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": changed or None}

    def stand_in(self) -> Technique:
        """Replace `offload`: all tensors of a shadow are on one device, so that inputs could not leave it."""
        if not self.offload:
            return self
        return self.replacing(model=lambda technique, family: Call(checkpoint_to_nowhere, technique.settings()))

    @classmethod
    def find_in(cls, arguments: Arguments, facts: Mapping[str, Any]) -> Technique | None:
        # transformers 5.23 renamed the argument; 5.17 has only the older name
        by_argument = arguments.get("activation_checkpointing") or arguments.get("gradient_checkpointing")
        return cls() if by_argument or facts["recomputes"] else None
