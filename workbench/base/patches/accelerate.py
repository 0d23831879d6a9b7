"""Patches of accelerate."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from workbench.base.patches import replace_attribute


def prepare_models_with(accelerator: Any, prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Let the accelerator hand every model to `prepare`, and return its own method, which did this before.

    Needed while accelerate 1.x refuses shards that it has not cut, and takes FSDP on a CPU for DDP.
    """
    prepare_model: Callable[..., Any] = accelerator.prepare_model
    accelerator.prepare_model = prepare
    return prepare_model


@contextmanager
def give_every_rank_all_batches(accelerator: Any, device: Any) -> Iterator[None]:
    """Prepare data loaders as in a process that is alone, so that every rank gets all batches.

    Needed while accelerate 1.x has no argument for it.
    """
    from accelerate.data_loader import prepare_data_loader

    prepare = partial(
        prepare_data_loader,
        device=device,
        put_on_device=True,
        num_processes=1,
        process_index=0,
    )
    with replace_attribute(accelerator, "prepare", prepare):
        yield


@contextmanager
def gather_nothing(accelerator: Any) -> Iterator[None]:
    """Let each rank keep its own tensor where accelerate would gather those of all ranks, which are equal.

    Needed while accelerate 1.x has no argument for it.
    """
    with replace_attribute(accelerator, "gather", lambda tensor: tensor):
        yield


def leave_deepspeed_alone() -> None:
    """Keep accelerate, for good, from importing DeepSpeed, which takes seconds, to see whether a model is DeepSpeed's.

    Needed until accelerate asks whether DeepSpeed was imported.
    """
    from accelerate.utils import other

    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules
