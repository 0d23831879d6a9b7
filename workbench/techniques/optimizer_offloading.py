"""Optimizer offloading: Adam's two moments live in host memory or on a disk and visit the device in chunks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.base.settings import setting
from workbench.techniques.base import Call, Capability, Stage
from workbench.techniques.offloading import Offloading


def streaming_adamw(states: Any, chunk: int, fused: bool) -> Any:
    """Define an AdamW whose moments wait at the place `states`. A step brings `chunk` elements of them at a time."""
    import torch
    from torch.optim.adamw import adamw

    class StreamingAdamW(torch.optim.Optimizer):
        def __init__(self, parameters: Any, **options: Any) -> None:
            super().__init__(parameters, options)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.update(parameter, group)

        def update(self, parameter: Any, group: Any) -> None:
            """Step one parameter in pieces, for each of which the moments come to the device and go back."""
            state = self.state[parameter]
            is_new = not state
            if is_new:
                state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
                state["rooms"] = [states.allocate(parameter.detach()) for _ in range(2)]
            weights = parameter.detach().view(-1)
            gradient = parameter.grad.reshape(-1)
            buffers = [torch.empty_like(weights[:chunk]) for _ in range(2)]
            for start in range(0, len(weights), chunk):
                piece = slice(start, start + chunk)
                moments = [buffer[: len(weights[piece])] for buffer in buffers]
                for room, moment in zip(state["rooms"], moments, strict=True):
                    if is_new:
                        moment.zero_()
                    else:
                        states.load(room, start, moment)
                self.update_piece(weights[piece], gradient[piece], moments, state["step"], group)
                for room, moment in zip(state["rooms"], moments, strict=True):
                    states.store(room, start, moment)
            state["step"] += 1

        def update_piece(
            self,
            weights: Any,
            gradient: Any,
            moments: list[Any],
            step: Any,
            group: Any,
        ) -> None:
            """Step a part of a parameter by PyTorch's own kernel."""
            average, average_of_squares = moments
            kernel: Any = adamw
            kernel(
                [weights],
                [gradient],
                [average],
                [average_of_squares],
                [],
                [step.clone()],  # the kernel counts up the step, which is the same for all pieces
                foreach=False,
                fused=fused,
                amsgrad=False,
                maximize=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )

        def state_dict(self) -> Any:
            if self.state:
                raise NotImplementedError(
                    "the optimizer states are offloaded and cannot be saved in a checkpoint: set save_strategy='no'"
                )
            return super().state_dict()

    return StreamingAdamW


def offload_optimizer(trainer: Any, place: Callable[[], Any], chunk: int) -> None:
    """Let the trainer step with AdamW, whose moments wait at a place outside of the device's memory."""
    _, options = trainer.get_optimizer_cls_and_kwargs(trainer.args)
    # Take the kernel that the trainer would use, so that the rounding is the same.
    fused = options.pop("fused", False)
    trainer.optimizer_cls_and_kwargs = (streaming_adamw(place(), chunk, fused), options)


@dataclass(frozen=True)
class OptimizerOffloading(Offloading):
    """The two moments visit the device, a chunk at a time, where PyTorch's own AdamW kernel steps.

    16 bytes a parameter and step cross the bus in fp32. ZeRO-Offload (Ren et al., arXiv 2101.06840) moves 8 instead:
    the gradients go to the host, and the processor steps on its own fp32 copy of the weights.
    """

    chunk_elements: int = setting(2**20, "elements on the device at a time", minimum=1024)

    stage = Stage.OPTIMIZE
    what = "optimizer states"
    brings = frozenset({Capability.OPTIMIZER})
    forbids = frozenset({Capability.OPTIMIZER})
    # The optimizer's state holds the places of the moments, and not the moments themselves.
    can_be_resumed = False

    def trainer(self) -> Call:
        settings = {"place": self.place, "chunk": self.chunk_elements}
        return Call(offload_optimizer, settings, measured=self.with_account())
