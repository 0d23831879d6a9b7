"""One run on several ranks: every one executes the recipe on its part of the batch, the first keeps the record."""

import json
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workbench.measure.allocators import allocator_for
from workbench.measure.categories import Category
from workbench.measure.meter import Meter
from workbench.models.load import count_parameters
from workbench.ranks import zero
from workbench.ranks.shard import ResizableTracker, fully_sharded, gathered, mesh_of, whole
from workbench.ranks.shards import SHARDS, Ranks
from workbench.ranks.trainer import RankTrainer
from workbench.ranks.world import agree, from_all, from_first, join, refuse_settings
from workbench.recipe import Recipe
from workbench.records import store
from workbench.records.record import Record, Status
from workbench.run.run import Execution, load_for, run
from workbench.run.world import World

MEMORY = (
    "peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "by_category", "maximum_by_category", "by_phase",
    "before_bytes", "peak_host_bytes", "peak_disk_bytes", "moved_bytes",
)  # fmt: skip
SUMMED = ("tokens_seen", "padding_tokens", "tokens_per_s")  # over the ranks
LOST = "another rank ended without a word"


class RankMeter(Meter):
    """Weights that are gathered count as weights, as long as they are whole."""

    tracker_kind = ResizableTracker

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        first: Any = next(model.parameters())
        # where this rank computes: what it keeps of the model may wait on the host
        device = torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
        self.others: Callable[[], Mapping[Category, list[torch.Tensor]]] = dict  # what an engine keeps beside the model
        self.buckets: dict[int, weakref.ref[torch.Tensor]] = {}  # of DDP, which live as long as the Trainer's model
        if elsewhere := first.device.type != device.type:
            options.setdefault("tracker", self.tracker_kind(device.type, getattr(model.config, "vocab_size", None)))
        super().__init__(model, **options)
        if elsewhere:
            self._allocator, self._device_type, self.enforces_cap = allocator_for(device), device.type, False

    def _owned(self) -> dict[Category, list[torch.Tensor]]:
        owned = super()._owned()
        owned[Category.WEIGHTS] += gathered(self._model)
        owned[Category.GRADIENTS] += [bucket for its in self.buckets.values() if (bucket := its()) is not None]
        return owned | {category: owned[category] + tensors for category, tensors in self.others().items()}

    def label_now(self, *_: Any, **__: Any) -> None:
        """Within a phase: what will be gone when it ends."""
        if self._attributing:
            self._label_owned()


class RankExecution(Execution):
    """One rank's execution of a job. What is asked of all is asked of each in the same order, or they would wait."""

    trainer_kind, meter_kind = RankTrainer, RankMeter
    shard: ClassVar[str] = "none"
    check = staticmethod(refuse_settings)

    @classmethod
    def world(cls, device: str | None = None) -> World:
        Ranks(shard=cls.shard).require()
        world = join(device, cls.shard)
        if SHARDS[cls.shard]["engine"] == "deepspeed":
            zero.set_accelerator(world.device_kind)
            zero.open_disk(cls.shard)
        return world

    @classmethod
    def begin(cls, record: Record, folder: Path | None, resume: bool = False) -> Record:
        Ranks(record.world_size, cls.shard).check(Recipe.from_dict(record.recipe))
        agree({"versions": record.versions, "recipe": record.recipe, "text": record.data_sha256, "shard": cls.shard})
        return replace(from_first(lambda: store.begin(record, folder, resume)), rank=record.rank)

    @classmethod
    def end(cls, record: Record, folder: Path | None, error: BaseException | None) -> Record:
        """The first rank keeps the record: of the rank with the highest peak, with those of all; or why it failed."""
        with suppress(OSError):
            if record.status in (Status.OK, Status.DIVERGED):
                record = _joined(record)
            elif record.status is not Status.UNAVAILABLE:
                record = _explained(record, folder, error)
        return store.end(record, folder) if record.rank == 0 else record

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        self.counted = count_parameters(model)  # DeepSpeed leaves empty parameters behind
        if SHARDS[self.shard]["engine"] == "fsdp":
            return fully_sharded(model, self.shard, mesh_of(self.job.device.type, self.record.world_size))
        if SHARDS[self.shard]["engine"] == "deepspeed":
            model = zero.partitioned(model, self.shard)
        return super().placed(model)

    def _note_actual(self, *given: Any) -> None:
        super()._note_actual(*given)
        parameters, trainable = self.counted
        dtype = getattr(self.trainer, "dtype", self.record.dtype)
        self.record = replace(self.record, parameters=parameters, trainable_parameters=trainable, dtype=dtype)

    def write(self) -> None:
        if self.record.rank == 0:
            super().write()

    def _checkpoint(self) -> Path | None:
        return from_first(super()._checkpoint)

    def _keep(self, model: PreTrainedModel) -> str:
        """Written by the first rank, from a model of its own in host memory where this one is sharded."""
        if self.options.save is None:
            return ""
        engine = SHARDS[self.shard]["engine"]
        values = zero.unpartitioned(model) if engine == "deepspeed" else whole(model.state_dict())
        if self.record.rank != 0:
            return ""
        if engine != "ddp":
            model = load_for(self.job)
            model.load_state_dict(values)
        return super()._keep(model)


def execution_of(shard: str) -> type[RankExecution]:
    return type("RankExecution", (RankExecution,), {"shard": shard, "trainer_kind": zero.trainer_of(shard)})


def run_as_rank(recipe: Recipe, *, shard: str = "none", **options: Any) -> Record:
    """`workbench.run` in a process that torchrun or `accelerate launch` has started as one of several ranks.

    The effective batch is shared among them, and losses are those of one process, up to rounding. The first rank
    returns, and keeps, the one record: its memory is that of the rank with the highest peak, `ranks` has them all.

    Args:
        shard: what each rank keeps, a name of `shards.toml`.
        options: those of `run`.

    Raises:
        ConfigurationError: the ranks cannot share the batch, a technique cannot be sharded, or the ranks are not alike;
            and as `run`.
    """
    Ranks(shard=shard)
    with suppress(ValueError):  # in another thread than the main one
        signal.signal(signal.SIGTERM, _told_to_end)
    joined = dist.is_initialized()  # by a program that runs several recipes
    try:
        with patch.dict(os.environ):  # which joining adds to
            record = run(recipe, execution=execution_of(shard), **options)
        dist.barrier()  # gloo's threads let go of what they have sent, which they cannot while the group is destroyed
        return record
    finally:
        zero.forget()
        if not joined and dist.is_initialized():
            dist.destroy_process_group()


def _told_to_end(*_: Any) -> None:
    """The launcher ends the ranks that are left when one has ended."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    raise SystemExit(LOST)


def is_lost(error: BaseException | None) -> bool:
    """Whether this rank ended because another one had ended."""
    return isinstance(error, SystemExit) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def _joined(record: Record) -> Record:
    """With what all ranks have measured."""
    ranks = from_all({name: getattr(record, name) for name in (*MEMORY, *SUMMED)})
    highest = max(ranks, key=lambda its: its["peak_allocated_bytes"])
    sums = {name: sum(values) for name in SUMMED if None not in (values := [its[name] for its in ranks])}
    told = [{"rank": rank, **{name: its[name] for name in MEMORY[:4]}} for rank, its in enumerate(ranks)]
    return replace(record, **{name: highest[name] for name in MEMORY}, **sums, ranks=told)


def _explained(record: Record, folder: Path | None, error: BaseException | None) -> Record:
    """What went wrong: with this rank, or, where this one only lost another, with that one."""
    words = {"status": record.status, "error": f"rank {record.rank}: {record.error}"}
    place = store.checkpoint_folder(record, folder).parent
    lost = is_lost(error)
    if record.rank != 0 and not lost:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"rank-{record.rank}.json").write_text(json.dumps(words))
    if lost:
        found = sorted(place.glob("rank-*.json"))
        words = json.loads(found[0].read_text()) if found else {"status": Status.KILLED, "error": LOST}
    return replace(record, status=Status(words["status"]), error=words["error"])
