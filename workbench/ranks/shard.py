"""Sharding with FSDP2, and the books of memory that grows and shrinks in place."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench.measure.allocators import parts
from workbench.measure.categories import Category
from workbench.measure.tracker import Storage, StorageTracker
from workbench.ranks.shards import SHARDS

RESIZE = torch.UntypedStorage.resize_
TRYING = "_propagate_tensor_meta_non_cached"  # how DTensor tries an operation on fake tensors


def fully_sharded(model: PreTrainedModel, shard: str, mesh: Any) -> PreTrainedModel:
    """The model with FSDP2 around every transformer block and around the rest, as PyTorch's documentation of
    `fully_shard` advises. Where a rank of the mesh is a GPU, its shards come there, a block at a time."""
    row = SHARDS[shard]
    settings = {"mesh": mesh, **row.get("settings", {})}
    if row.get("offload") and mesh.device_type != "cpu":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def mesh_of(device_kind: str, count: int) -> Any:
    """All ranks in one row."""
    return init_device_mesh(device_kind, (count,))


def whole(values: Any) -> Any:
    """Nested values with every shard gathered, in host memory: all ranks must ask."""
    return tree_map(lambda value: value.full_tensor().cpu() if isinstance(value, DTensor) else value, values)


def cut_like(value: Any, like: Any) -> Any:
    """This rank's shard of a whole tensor, as that of another of its shape is cut; anything else as it is."""
    if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape:
        return distribute_tensor(
            value.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
        )
    return value


def _aside(function: Any) -> Any:
    """The function outside of all modes."""

    def called(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return called


class ResizableTracker(StorageTracker):
    """Books storages that are emptied and filled again in place, as FSDP2 does with what it gathers; of a tensor that
    is sharded, what lies on this rank. Whole fake ones, on which DTensor tries its operations, are not there."""

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        self._patches.enter_context(patch.object(torch.UntypedStorage, "resize_", self._resized(RESIZE)))
        trying = _aside(getattr(ShardingPropagator, TRYING))
        self._patches.enter_context(patch.object(ShardingPropagator, TRYING, trying))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _resized(self, resize: Any) -> Any:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            before = self._alive.get(storage._cdata)
            if before is not None and size != before.nbytes:
                self._bury(storage._cdata, before)
            result = resize(storage, size)
            if size and storage.device.type in (self.device_type, "meta"):  # where a fake tensor has its storage
                self._book(torch.empty(0, dtype=torch.uint8, device=self.device_type).set_(storage))
            return result

        return resized

    def _bury(self, key: int, storage: Storage) -> None:
        if storage.died is None:  # an emptied one ends once more, with its tensor
            super()._bury(key, storage)

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        super().label(chain.from_iterable(parts(tensor) for tensor in tensors), category)


def gathered(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights that are whole on this rank at the moment."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for parameter in getattr(module._get_fsdp_state()._fsdp_param_group, "fsdp_params", ()):
                yield from (t for t in parameter.all_gather_outputs if t.untyped_storage().nbytes())
