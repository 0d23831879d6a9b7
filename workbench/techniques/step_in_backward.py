"""The optimizer's step in the backward pass: each gradient is used and dropped as soon as it is there."""

import weakref
from dataclasses import dataclass
from typing import Any

from workbench.settings import setting
from workbench.techniques.base import Arguments, Call, Capability, Stage, Technique


def one_by_one(kind: Any, max_grad_norm: float) -> Any:
    """An optimizer class, made of one of a kind for each parameter: it steps when the gradient comes, and drops it."""
    import torch

    class OneByOne(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
            super().__init__(groups, {})
            every = {p: {**group, "params": [p]} for group in groups for p in group["params"]}
            self.each = {parameter: kind([group], **options) for parameter, group in every.items()}
            self.gather()
            # hooks that hold the optimizer would hold the parameters they hang on, where no collector looks
            step: Any = weakref.WeakMethod(self.step_one)
            for parameter in self.each:
                parameter.register_post_accumulate_grad_hook(lambda p: step()(p) if step() else None)

        def gather(self) -> None:
            """The learning rate's schedule finds the groups of all of them here."""
            self.param_groups = [group for one in self.each.values() for group in one.param_groups]

        @property
        def state(self) -> Any:
            return {parameter: its for one in self.each.values() for parameter, its in one.state.items()}

        @state.setter
        def state(self, _: Any) -> None: ...

        def step_one(self, parameter: Any) -> None:
            if max_grad_norm:
                torch.nn.utils.clip_grad_norm_([parameter], max_grad_norm)
            self.each[parameter].step()
            parameter.grad = None

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Nothing is left to do."""

        def state_dict(self) -> Any:
            """That of each: its class knows which states may be cast when they are loaded."""
            return {"each": [one.state_dict() for one in self.each.values()]}

        def load_state_dict(self, saved: Any) -> None:
            for one, its in zip(self.each.values(), saved["each"], strict=True):
                one.load_state_dict(its)
            self.gather()

    return OneByOne


def step_in_backward(trainer: Any, max_grad_norm: float) -> None:
    """The trainer's optimizer, whichever it is, steps parameter by parameter during the backward pass."""
    kind, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args)
    trainer.optimizer_cls_and_kwargs = (one_by_one(kind, max_grad_norm), options)


@dataclass(frozen=True)
class StepInBackward(Technique):
    """Of all gradients only the newest lives: autograd's hook on a parameter steps and drops it.

    Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO, arXiv 2306.09782),
    for SGD; PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass" for any. The
    gradient of a tied embedding lives from the head to the end of the backward pass. The norm of all gradients is
    known only when the first are gone, so each is clipped by its own; without clipping the numbers are the same.
    """

    max_grad_norm: float = setting(1.0, "each parameter's gradient is clipped to this norm; 0: not at all", minimum=0.0)

    stage = Stage.STEP
    forbids = frozenset({Capability.ACCUMULATION, Capability.LOSS_SCALING})

    def training_arguments(self, arguments: Arguments) -> Arguments:
        return {**arguments, "max_grad_norm": 0.0}

    def trainer(self) -> Call:
        return Call(step_in_backward, self.settings())
