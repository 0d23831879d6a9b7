"""torch.compile: the step as kernels that PyTorch's compiler makes, with a budget for what they keep."""

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

TRITONS = (7, 0)  # the compute capability that Triton needs


def compile_training(trainer: Any, memory_budget: float) -> None:
    """The model is compiled for its training steps, which all have one shape; evaluations stay as they are."""
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
    # each length is compiled anew, in the middle of what is timed
    forbids = frozenset({Capability.UNEQUAL_BATCHES})
    untraceable = "torch_compile needs an emulated GPU and Triton. Or measure it with `run`."
    worth_trying = ()  # a prediction compiles, which takes minutes: too long for a search

    def missing(self, device: Device) -> str | None:
        lacking = _lacking(device)
        if lacking:
            return f"{self.name} needs {lacking}. Or leave {self.name} out."
        return None

    @contextmanager
    def run_context(self) -> Iterator[None]:
        """What was compiled before is forgotten: it would serve the next model too, whatever its budget is."""
        import torch._functorch.config

        guards: Any = torch._C._dynamo.guards
        with ExitStack() as stack:
            # compiled code takes memory by these functions, which the tracker would not see
            for device in ("cpu", "cuda"):
                name = f"_empty_strided_{device}"
                stack.callback(setattr, guards, name, getattr(guards, name))
                setattr(guards, name, seen_by_tracker(device))
            torch._dynamo.reset()
            stack.callback(torch._dynamo.reset)  # however the run ends
            # which is back at the end
            stack.enter_context(torch._functorch.config.patch(activation_memory_budget=1.0))
            yield

    def trainer(self) -> Call:
        return Call(compile_training, self.settings())

    def stand_in(self) -> Technique:
        raise ConfigurationError(f"predict: {self.untraceable}")


def _lacking(device: Device) -> str:
    """What this machine lacks to compile for a device, with its cure; empty if it is nothing."""
    if device.kind not in ("cpu", "cuda"):
        return f"a CPU or CUDA, not {device.kind}: use --device cpu"
    compiler = os.environ.get("CXX", "g++")
    if device.kind == "cuda":
        compiler = os.environ.get("CC", "gcc")
        if find_spec("triton") is None or (device.compute_capability or TRITONS) < TRITONS:
            return "compute capability 7.0 and Triton: pip install triton"
    if which(compiler) is None:
        return f"the compiler {compiler}: install it, or name another by CC and CXX"
    return ""


def seen_by_tracker(device: str) -> Callable[..., Any]:
    """How compiled code takes memory. PyTorch's own function for that goes past the dispatcher, and no tracker sees it;
    this one goes through it while something watches there."""
    import torch

    plain = getattr(torch._C._dynamo.guards, f"_empty_strided_{device}")

    def empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
        if torch._C._len_torch_dispatch_stack() > 0:
            return torch.empty_strided(size, stride, dtype=dtype, device=device)
        return plain(size, stride, dtype)

    return empty_strided
