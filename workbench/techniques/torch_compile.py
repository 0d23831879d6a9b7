"""torch.compile: the step as kernels that PyTorch's compiler makes, with a budget for what they keep."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import which
from typing import Any
from unittest.mock import patch

from workbench.errors import ConfigurationError
from workbench.measure.device import Device
from workbench.settings import setting
from workbench.techniques.base import Call, Capability, Stage, Technique

TRITONS = (7, 0)  # the compute capability that Triton needs


def compile_training(trainer: Any, memory_budget: float) -> None:
    """The model is compiled for its training steps, which all have one shape; evaluations stay as they are."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = memory_budget
    whole, compiled = trainer.compute_loss, torch.compile(trainer.model)

    trainer.compute_loss = lambda model, *args, **kwargs: whole(compiled if model.training else model, *args, **kwargs)


@dataclass(frozen=True)
class TorchCompile(Technique):
    """Forward and backward pass become one graph each, in kernels that read once and write once.

    What lies between them is kept where computing it again would cost more than reading it; `memory_budget`,
    `torch._functorch.config.activation_memory_budget`, lowers that to a share of it, by what is cheapest to compute
    again. The logits stay whole. Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode
    Transformation and Graph Compilation", ASPLOS 2024; PyTorch's blog, "Current and New Activation Checkpointing
    Techniques in PyTorch", 2025. Dropout is drawn by the kernels, other numbers than PyTorch's own.

    The Trainer's `torch_compile=True` is not the same: it compiles evaluations too, each shape by itself, and where
    there is TF32 it makes matrix products of the whole process less precise.
    """

    memory_budget: float = setting(1.0, "share of what a compiled step keeps by itself", minimum=0, maximum=1)

    stage = Stage.COMPILE
    forbids = frozenset({Capability.UNEQUAL_BATCHES})  # each length is compiled anew, in the middle of what is timed
    worth_trying = ()  # a prediction compiles, which takes minutes: too long for a search

    def missing(self, device: Device) -> str | None:
        from torch.utils._triton import has_triton_package

        variable, usual = ("CC", "gcc") if device.kind == "cuda" else ("CXX", "g++")
        compiler = os.environ.get(variable, usual)
        if device.kind not in ("cpu", "cuda"):
            needed = f"a CPU or CUDA, not {device.kind}: use --device cpu"
        elif device.kind == "cuda" and not (has_triton_package() and (device.compute_capability or TRITONS) >= TRITONS):
            needed = "compute capability 7.0 and Triton: pip install triton"
        elif which(compiler) is None:
            needed = f"the compiler {compiler}: install it, or name another by CC and CXX"
        else:
            return None
        return f"{self.name} needs {needed}. Or leave {self.name} out."

    @contextmanager
    def run_context(self) -> Iterator[None]:
        """What was compiled before is forgotten: it would serve the next model too, whatever its budget is."""
        import torch._functorch.config

        taking = {f"_empty_strided_{device}": seen_by_tracker(device) for device in ("cpu", "cuda")}
        torch._dynamo.reset()
        budget = torch._functorch.config.patch(activation_memory_budget=1.0)
        with patch.multiple("torch._C._dynamo.guards", **taking), budget:  # type: ignore[call-overload]
            yield
        torch._dynamo.reset()

    def trainer(self) -> Call:
        return Call(compile_training, self.settings())

    def stand_in(self) -> Technique:
        raise ConfigurationError(f"predict: {self.name} needs an emulated GPU and Triton. Or measure it with `run`.")


def seen_by_tracker(device: str) -> Callable[..., Any]:
    """How compiled code takes memory, past PyTorch's dispatcher; through it while something watches there."""
    import torch

    plain = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")

    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        watched = torch._C._len_torch_dispatch_stack() > 0
        return torch.empty_strided(size, stride, dtype=dtype, device=device) if watched else plain(size, stride, dtype)

    return empty_strided
