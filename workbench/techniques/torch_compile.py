"""torch.compile: PyTorch's compiler makes kernels of the step, with a budget for what they keep."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which
from typing import Any

from workbench.base.device import Device
from workbench.base.errors import ConfigurationError
from workbench.base.settings import setting
from workbench.techniques.base import Call, Capability, Stage, Technique

TRITON_CAPABILITY = (7, 0)  # the oldest compute capability for which Triton compiles


def compile_training(trainer: Any, memory_budget: float) -> None:
    """Compile the trainer's model for its training steps, which all have one shape. Evaluations stay as they are."""
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = memory_budget
    plain_compute_loss = trainer.compute_loss
    compiled = torch.compile(trainer.model)

    def compute_loss(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            model = compiled
        return plain_compute_loss(model, *args, **kwargs)

    trainer.compute_loss = compute_loss


@dataclass(frozen=True)
class TorchCompile(Technique):
    """Forward and backward pass become one graph each, in kernels that read once and write once.

    An activation is kept between them where computing it again would cost more than reading it. `memory_budget`,
    `torch._functorch.config.activation_memory_budget`, lowers the kept bytes to a share: the activations that are
    cheapest to compute again are dropped first. The logits stay whole. Ansel et al., "PyTorch 2: Faster Machine
    Learning Through Dynamic Python Bytecode Transformation and Graph Compilation", ASPLOS 2024; PyTorch's blog,
    "Current and New Activation Checkpointing Techniques in PyTorch", 2025. The kernels draw other random numbers for
    dropout than PyTorch's own.

    The Trainer's `torch_compile=True` does more: it compiles evaluations too, each shape by itself, and where there is
    TF32 it makes matrix products of the whole process less precise.
    """

    memory_budget: float = setting(1.0, "share of what a compiled step keeps by itself", minimum=0, maximum=1)

    stage = Stage.COMPILE
    # Each new length would be compiled by itself, in the middle of the measured steps.
    forbids = frozenset({Capability.UNEQUAL_BATCHES})
    why_not_traced = "torch_compile needs an emulated GPU and Triton. Or measure it with `run`."
    worth_trying = ()  # a prediction would compile, which takes minutes: too long for a search

    def missing(self, device: Device) -> str | None:
        lacking = _lacking(device)
        return f"{self.name} needs {lacking}. Or leave {self.name} out." if lacking else None

    @contextmanager
    def run_context(self) -> Iterator[None]:
        """Forget what was compiled before: it would serve the next model too, whatever its budget is."""
        import torch._functorch.config

        guards: Any = torch._C._dynamo.guards
        with ExitStack() as stack:
            # Compiled code allocates by these functions, which the tracker would not see.
            for device in ("cpu", "cuda"):
                name = f"_empty_strided_{device}"
                stack.callback(setattr, guards, name, getattr(guards, name))
                setattr(guards, name, make_allocation_visible(device))
            torch._dynamo.reset()
            stack.callback(torch._dynamo.reset)  # whether the run succeeds or fails
            # `compile_training` changes this setting; its old value returns at the end.
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0))
            yield

    def trainer(self) -> Call:
        return Call(compile_training, self.settings())

    def stand_in(self) -> Technique:
        raise ConfigurationError(f"predict: {self.why_not_traced}")


def _lacking(device: Device) -> str:
    """Name what this machine lacks to compile for a device, with its cure; empty if it lacks nothing."""
    if device.kind not in ("cpu", "cuda"):
        return f"a CPU or CUDA, not {device.kind}: use --device cpu"
    compiler = os.environ.get("CXX", "g++")
    if device.kind == "cuda":
        compiler = os.environ.get("CC", "gcc")
        if find_spec("triton") is None or (device.compute_capability or TRITON_CAPABILITY) < TRITON_CAPABILITY:
            return "compute capability 7.0 and Triton: pip install triton"
    if which(compiler) is None:
        return f"the compiler {compiler}: install it, or name another by CC and CXX"
    return ""


def make_allocation_visible(device: str) -> Callable[..., Any]:
    """Return a function that allocates for compiled code so that a tracker sees it.

    PyTorch's own function for that goes past the dispatcher, where trackers watch. This one goes through the dispatcher
    while something watches there.
    """
    import torch

    plain = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")

    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        return plain(size, stride, dtype)

    return empty_strided
