"""The optimizer steps during the backward pass: each gradient is used and dropped as soon as it is computed."""

import weakref
from dataclasses import dataclass
from typing import Any

from workbench.base.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


def one_by_one(optimizer_class: Any, max_grad_norm: float) -> Any:
    """Define an optimizer that steps a parameter as soon as its gradient is computed, and drops the gradient.

    It consists of one optimizer of the given class for each parameter.
    """
    import torch

    class OneByOne(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            super().__init__(groups, {})
            self.optimizers: dict[Any, Any] = {}
            for group in groups:
                for parameter in group["params"]:
                    self.optimizers[parameter] = optimizer_class([{**group, "params": [parameter]}], **options)
            self.gather_groups()
            # Autograd holds the hook. If the hook held the optimizer, and so the parameter that it hangs on, that would
            # be a cycle that Python's collector does not see.
            weak_step: Any = weakref.WeakMethod(self.step_parameter)

            def hook(parameter: Any) -> None:
                step_parameter = weak_step()
                if step_parameter is not None:
                    step_parameter(parameter)

            for parameter in self.optimizers:
                parameter.register_post_accumulate_grad_hook(hook)

        def gather_groups(self) -> None:
            """Gather the groups of all the optimizers where the learning rate's schedule looks for them."""
            self.param_groups = []
            for optimizer in self.optimizers.values():
                self.param_groups += optimizer.param_groups

        @property
        def state(self) -> Any:
            states = {}
            for optimizer in self.optimizers.values():
                states.update(optimizer.state)
            return states

        @state.setter
        def state(self, _: Any) -> None:
            """Ignore the empty state that PyTorch's base class sets."""

        def step_parameter(self, parameter: Any) -> None:
            if max_grad_norm:
                torch.nn.utils.clip_grad_norm_([parameter], max_grad_norm)
            self.optimizers[parameter].step()
            parameter.grad = None

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing: the backward pass has stepped every parameter."""

        def state_dict(self) -> Any:
            """Return the state of each optimizer: its class knows which states may be cast when they are loaded."""
            return {"each": [optimizer.state_dict() for optimizer in self.optimizers.values()]}

        def load_state_dict(self, saved: Any) -> None:
            for optimizer, state_dict in zip(self.optimizers.values(), saved["each"], strict=True):
                optimizer.load_state_dict(state_dict)
            self.gather_groups()  # loading makes new groups

    return OneByOne


def step_in_backward(trainer: Any, max_grad_norm: float) -> None:
    """Let the trainer's optimizer, whichever it is, step parameter by parameter during the backward pass."""
    optimizer_class, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (one_by_one(optimizer_class, max_grad_norm), options)


@dataclass(frozen=True)
class StepInBackward(Technique):
    """No gradient but the newest exists: autograd's hook on a parameter uses it for a step and drops it.

    Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO, arXiv 2306.09782),
    for SGD; PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass" for any. The
    gradient of a tied embedding lives from the head to the end of the backward pass. The norm of all gradients is
    known only when the first gradients are gone, so each is clipped by its own norm. Without clipping the numbers are
    those of a usual step.
    """

    max_grad_norm: float = setting(1.0, "each parameter's gradient is clipped to this norm; 0: not at all", minimum=0.0)

    stage = Stage.STEP
    forbids = frozenset({Capability.ACCUMULATION, Capability.LOSS_SCALING})

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, "max_grad_norm": 0.0}

    def trainer(self) -> Call:
        return Call(step_in_backward, self.settings())
