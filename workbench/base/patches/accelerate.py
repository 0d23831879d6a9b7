"""What is replaced in accelerate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from workbench.base.patches import replaced


def prepare_models_with(accelerator: Any, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Let the accelerator hand every model to a function; what it did with them is returned.

    While accelerate 1.x refuses shards that it has not made, and takes FSDP on a CPU for DDP.
    """
    its_own: Callable[..., Any] = accelerator.prepare_model
    accelerator.prepare_model = prepare
    return its_own


@contextmanager
def all_batches_for_every_rank(accelerator: Any, device: Any) -> Iterator[None]:
    """Data loaders are prepared as in a process that is alone: nothing of them is left to other ranks.

    While accelerate 1.x has no argument for that.
    """
    from accelerate.data_loader import prepare_data_loader

    prepare = partial(
        prepare_data_loader,
        device=device,
        put_on_device=True,
        num_processes=1,
        process_index=0,
    )
    with replaced(accelerator, "prepare", prepare):
        yield


@contextmanager
def nothing_gathered(accelerator: Any) -> Iterator[None]:
    """What ranks compute alike is not gathered from all of them. While accelerate 1.x has no argument for that."""

    def unchanged(tensor: Any) -> Any:
        return tensor

    with replaced(accelerator, "gather", unchanged):
        yield


def leave_deepspeed_alone() -> None:
    """For good: accelerate would import DeepSpeed, which takes seconds, to see whether a model is one of its.

    Until: accelerate asks whether it was imported.
    """
    from accelerate.utils import other

    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
