"""Count in every process of a foreign program what its weights, gradients and states take on the card.

No allocator is asked. Their bytes are a lower bound of the peak; `tools/programs.py` reads them from `COUNTED_IN`.

The emulator's own module of this name imports this one, as it does with any program's.
"""

import gc
import json
import os
from pathlib import Path
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

FILE = Path(os.environ["COUNTED_IN"], f"{os.getpid()}.json")
PLAIN = (torch.Tensor, torch.nn.Parameter)  # others may have no storage of their own: they do not count
SEARCHED_STEPS = 3  # the first steps look for frozen weights too, among all that Python knows: a tenth of a second
optimizers: WeakSet[Optimizer] = WeakSet()
steps = 0
most_bytes = 0


def count(stepped: Optimizer, *_) -> None:
    """Note after a step what lives now, of all optimizers, since a GAN has two."""
    global steps
    steps += 1
    optimizers.add(stepped)
    living = []
    if steps <= SEARCHED_STEPS:
        living += weights()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                living.append(parameter)
                living.append(parameter.grad)
                living += optimizer.state.get(parameter, {}).values()
    note(living)


def count_at_the_first_call(module: torch.nn.Module, *_) -> None:
    """Count the weights when a module of the card is first called, since a program that only infers has no steps."""
    weight = next(module.parameters(), None)
    if weight is not None and weight.device.type == "cuda":
        first_call.remove()
        note(weights())


def weights() -> list[torch.Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter]


def note(living: list[torch.Tensor | None]) -> None:
    global most_bytes
    storages = {}
    for tensor in living:
        tensor = getattr(tensor, "_local_tensor", tensor)  # a DTensor counts with what this rank has
        if type(tensor) in PLAIN and tensor.device.type == "cuda":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    most_bytes = max(most_bytes, sum(storages.values()))
    FILE.write_text(json.dumps({"steps": steps, "bytes": most_bytes}))


register_optimizer_step_post_hook(count)
first_call = register_module_forward_pre_hook(count_at_the_first_call)
