"""Stand-ins for optimizers whose kernels cannot be traced, or that keep states in unified memory.

They allocate the same bytes at the same moments, without arithmetic.

The bytes are those of bitsandbytes 0.50 and FlashOptim 0.1.4, as each docstring names them; neither need be installed.
"""

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

# The first three are constants of `Optimizer2State`; the last one stands in `get_state_buffer`.
EIGHT_BIT_BLOCK = 256  # elements that share a scale
EIGHT_BIT_MINIMUM = 4096  # elements; a smaller parameter has 32-bit states
EIGHT_BIT_VALUES = 256  # entries of the table of values that 8 bits stand for
PAGED_MINIMUM = 100_000  # elements; a smaller state is not paged


# ---- bitsandbytes: states of 8 bits, or in unified memory ----


def use_bitsandbytes(trainer: Any, bits: int, paged: bool) -> None:
    """Let the trainer use the stand-in for an AdamW of bitsandbytes'. Embeddings get 32-bit states, as the Trainer
    asks.

    Args:
        bits: the size of a number in the states, 8 or 32.
        paged: large states are in unified memory.
    """
    trainer.optimizer_cls_and_kwargs = (LibrarysAdamW, {"bits": bits, "paged": paged})
    plain_create = trainer.create_optimizer

    def create_optimizer() -> Any:
        optimizer = plain_create()
        # The Trainer asks only bitsandbytes' own optimizer for 32-bit states: not one that wraps it for each parameter.
        if isinstance(optimizer, LibrarysAdamW):
            for module in trainer.model.modules():
                if isinstance(module, torch.nn.Embedding):
                    optimizer.embeddings.add(id(module.weight))
        return optimizer

    trainer.create_optimizer = create_optimizer


class LibrarysAdamW(torch.optim.Optimizer):
    """An optimizer that allocates in its first step what `Optimizer2State.init_state` does, and computes nothing.

    The library's kernels change weights and states in place; besides, a gradient is made contiguous. Large states that
    are paged are outside of PyTorch's allocator.
    """

    def __init__(self, parameters: Any, bits: int, paged: bool) -> None:
        super().__init__(parameters, {})
        self.bits = bits
        self.paged_from = PAGED_MINIMUM if paged else math.inf
        self.embeddings: set[int] = set()  # ids of the parameters with 32-bit states
        self.tables: dict[str, torch.Tensor] = {}  # shared by all parameters

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.new_state(parameter)
                    parameter.grad = parameter.grad.contiguous()

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Allocate the state of a parameter: two averages, with scales where they are of 8 bits."""
        both = (1, 2)
        on_device = both if parameter.numel() < self.paged_from else ()
        if self.bits == 32 or parameter.numel() < EIGHT_BIT_MINIMUM or id(parameter) in self.embeddings:
            return {f"state{i}": torch.zeros_like(parameter, dtype=torch.float32) for i in on_device}
        blocks = math.ceil(parameter.numel() / EIGHT_BIT_BLOCK)
        for i in both:
            self.tables.setdefault(f"qmap{i}", torch.empty(EIGHT_BIT_VALUES, device=parameter.device))
        state = {f"state{i}": torch.zeros_like(parameter, dtype=torch.uint8) for i in on_device}
        for i in both:
            state[f"absmax{i}"] = torch.zeros(blocks, device=parameter.device)
        return state | self.tables


# ---- FlashOptim ----


class FlashStates(LibrarysAdamW):
    """An optimizer that allocates what `flashoptim.FlashAdamW` does for bf16 weights (`_ensure_state_initialized`)."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, **_: Any) -> None:
        super().__init__([{**group, "lr": lr} for group in groups], bits=8, paged=False)

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            plain = torch.zeros_like(parameter)
            state[name] = torch.empty_like(plain, dtype=torch.uint8)
            state[f"{name} scales"] = plain.new_empty((plain.numel() + 31) // 32, dtype=torch.float16)
        state["error_bits"] = torch.zeros_like(parameter, dtype=torch.int8)
        return state


# ---- torchao: states whose codes are looked up ----


def read_code_tables() -> None:
    """Let torchao read the values that its codes stand for: it does so once, off tensors that must not be fake ones."""
    if find_spec("torchao") is None:
        return
    for bits in (4, 8):
        states = import_module(f"torchao.optim.subclass_{bits}bit")
        states.get_qmap_signed()
        states.get_qmap_unsigned()
