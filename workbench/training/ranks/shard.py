"""Sharding with FSDP2, and a tracker for storages that grow and shrink in place."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from workbench.base.categories import Category
from workbench.base.patches.torch import hide_tried_operations, resize_storages_by
from workbench.measure.allocators import parts
from workbench.measure.tracker import Storage, StorageTracker
from workbench.training.ranks.shards import SHARDS

RESIZE = torch.UntypedStorage.resize_


def shard_fully(model: PreTrainedModel, shard: str, mesh: Any) -> PreTrainedModel:
    """Wrap every transformer block in FSDP2, and the rest of the model, as PyTorch's documentation of `fully_shard`
    advises. Where a rank of the mesh is a GPU, its shards come there, a block at a time."""
    row = SHARDS[shard]
    settings = {"mesh": mesh, **row["settings"]}
    if row.get("offload") and mesh.device_type != "cpu":
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in list(model.modules()):
        if isinstance(block, GradientCheckpointingLayer):
            fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model


def mesh_of(device_kind: str, count: int) -> Any:
    """Return a mesh with all ranks in one row."""
    return init_device_mesh(device_kind, (count,))


def gather_shards(values: Any) -> Any:
    """Return nested values with every sharded tensor gathered, in host memory. All ranks must call it."""
    return tree_map_only(DTensor, lambda shard: shard.full_tensor().cpu(), values)


class ResizableTracker(StorageTracker):
    """A tracker for storages that are emptied and filled again in place, as FSDP2 does with what it gathers.

    It books a sharded tensor's part that lies on this rank, and not the whole fake tensors on which DTensor tries its
    operations.
    """

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        self._patches.enter_context(resize_storages_by(self._resize))
        self._patches.enter_context(hide_tried_operations())
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def _resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        before = self._alive.get(storage._cdata)
        if before is not None and size != before.nbytes:
            self._bury(storage._cdata, before)
        result = RESIZE(storage, size)
        # A fake tensor has its storage on the meta device.
        if size and storage.device.type in (self.device_type, "meta"):
            self._book(torch.empty(0, dtype=torch.uint8, device=self.device_type).set_(storage))
        return result

    def _bury(self, key: int, storage: Storage) -> None:
        if storage.died is None:  # an emptied one ends once more, with its tensor
            super()._bury(key, storage)

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        plain: list[torch.Tensor] = []
        for tensor in tensors:
            plain += parts(tensor)
        super().label(plain, category)


def find_gathered_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights that are whole on this rank at the moment, under FSDP2."""
    weights: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            for parameter in getattr(group, "fsdp_params", ()):
                for tensor in parameter.all_gather_outputs:
                    if tensor.untyped_storage().nbytes():
                        weights.append(tensor)
    return weights
