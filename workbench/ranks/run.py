"""One run on several ranks: every one executes the recipe on its part of the batch, the first keeps the record."""

import json
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workbench.measure.allocators import allocator_for
from workbench.measure.categories import Category
from workbench.measure.meter import Meter
from workbench.models.load import count_parameters
from workbench.paths import check_writable, runs_folder
from workbench.ranks import zero
from workbench.ranks.shard import ResizableTracker, fully_sharded, gathered, mesh_of, whole
from workbench.ranks.shards import Ranks
from workbench.ranks.world import agree, from_all, from_first, join, refuse_settings
from workbench.recipe import Recipe
from workbench.records import store
from workbench.records.record import Record, Status
from workbench.run.job import Job, prepare
from workbench.run.place import Observer, Place, load_for
from workbench.run.run import executed, only_run
from workbench.run.trainer import SeamTrainer
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
        first: Any = next(model.parameters(), None)
        device = first.device
        if isinstance(first, DTensor):  # where this rank computes: what it keeps of the model may wait on the host
            device = torch.device(first.device_mesh.device_type)
        self.others: Callable[[], Mapping[Category, list[torch.Tensor]]] = dict  # what an engine keeps beside the model
        self.buckets: dict[int, weakref.ref[torch.Tensor]] = {}  # of DDP, which live as long as the Trainer's model
        waits_elsewhere = first.device.type != device.type
        if waits_elsewhere:
            options.setdefault("tracker", self.tracker_kind(device.type, getattr(model.config, "vocab_size", None)))
        super().__init__(model, **options)
        if waits_elsewhere:
            self._allocator = allocator_for(device)
            self._device_type = device.type
            self.enforces_cap = False

    def _owned(self) -> dict[Category, list[torch.Tensor]]:
        owned = super()._owned()
        owned[Category.WEIGHTS] += gathered(self._model)
        buckets = [reference() for reference in self.buckets.values()]
        owned[Category.GRADIENTS] += [bucket for bucket in buckets if bucket is not None]
        return owned | {category: owned[category] + tensors for category, tensors in self.others().items()}

    def label_now(self, *_: Any, **__: Any) -> None:
        """Within a phase: what will be gone when it ends."""
        if self._attributing:
            self._label_owned()


class RankPlace(Place):
    """One rank. What is asked of all is asked of each in the same order, or they would wait for each other."""

    meter_kind = RankMeter

    def __init__(self, job: Job, observe: Observer | None = None) -> None:
        super().__init__(job, observe)
        self.ranks = Ranks(job.world.world_size, job.world.shard)
        self.trainer_kind = zero.trainer_of(job.world.shard)
        self.counted = (0, 0)  # parameters, and those that are trained

    # ---- the record, which the first rank keeps ----

    def begin(self) -> None:
        record = self.record
        agree(
            {
                "versions": record.versions,
                "recipe": record.recipe_settings,
                "text": record.data_sha256,
                "shard": record.shard,
            }
        )
        begun = from_first(lambda: store.begin(record, self.job.folder, self.job.resume))
        self.record = replace(begun, rank=record.rank)

    def write(self) -> None:
        if self.record.rank == 0:
            super().write()

    def end(self) -> Record:
        """That of the rank with the highest peak, with those of all; or why it failed."""
        with suppress(OSError):
            if self.record.status in (Status.OK, Status.DIVERGED):
                self.record = _joined(self.record)
            elif self.record.status is not Status.UNAVAILABLE:
                self.record = _explained(self.record, self.run_folder, self.error)
        if self.record.rank == 0:
            super().end()
        return self.record

    # ---- the model, of which a rank may keep a part ----

    def placed(self, model: PreTrainedModel) -> PreTrainedModel:
        self.counted = count_parameters(model)  # DeepSpeed leaves empty parameters behind
        if self.ranks.engine == "fsdp":
            return fully_sharded(model, self.ranks.shard, mesh_of(self.job.device.kind, self.ranks.count))
        if self.ranks.engine == "deepspeed":
            model = zero.partitioned(model, self.ranks.shard)
        return super().placed(model)

    def trained_facts(self, model: PreTrainedModel, trainer: SeamTrainer) -> dict[str, Any]:
        facts = super().trained_facts(model, trainer)
        facts["parameters"], facts["trainable_parameters"] = self.counted
        facts["dtype"] = getattr(trainer, "dtype", facts["dtype"])
        return facts

    def checkpoint(self) -> Path | None:
        newest: Path | None = from_first(super().checkpoint)
        return newest

    def save(self, model: PreTrainedModel) -> None:
        """Written by the first rank, from a model of its own in host memory where this one is sharded."""
        if self.job.save is None:
            return
        values = zero.unpartitioned(model) if self.ranks.engine == "deepspeed" else whole(model.state_dict())
        if self.record.rank != 0:
            return
        if self.ranks.engine != "ddp":
            model = load_for(self.job, self.values)
            model.load_state_dict(values)
        super().save(model)


def join_world(device: str | None, shard: str) -> World:
    """This process as one of the ranks that a launcher has started. Raises as `join` and `Ranks.require` do."""
    Ranks(shard=shard).require()
    world = join(device, shard)
    if Ranks(shard=shard).engine == "deepspeed":
        zero.set_accelerator(world.device.kind)
        zero.open_disk(shard)
    return world


def run_as_rank(
    recipe: Recipe,
    *,
    shard: str = "none",
    device: str | None = None,
    folder: Path | None = None,
    observe: Observer | None = None,
    **options: Any,
) -> Record:
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
        with patch.dict(os.environ), only_run(recipe):  # joining adds to the environment
            refuse_settings()
            check_writable(folder or runs_folder())
            store.mark_killed(folder)
            world = join_world(device, shard)
            Ranks(world.world_size, shard).check(recipe)
            job = prepare(recipe, world, folder=folder, **options)
            record = executed(RankPlace(job, observe))
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
    highest = max(ranks, key=lambda facts: facts["peak_allocated_bytes"])
    joined: dict[str, Any] = {name: highest[name] for name in MEMORY}
    for name in SUMMED:
        values = [facts[name] for facts in ranks]
        if None not in values:
            joined[name] = sum(values)
    peaks = [{"rank": rank, **{name: facts[name] for name in MEMORY[:4]}} for rank, facts in enumerate(ranks)]
    return replace(record, **joined, ranks=peaks)


def _explained(record: Record, run_folder: Path, error: BaseException | None) -> Record:
    """What went wrong: with this rank, or, where this one only lost another, with that one. Ranks tell each other in
    files of the run's folder."""
    ending = {"status": record.status, "error": f"rank {record.rank}: {record.error}"}
    lost = is_lost(error)
    if record.rank != 0 and not lost:
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / f"rank-{record.rank}.json").write_text(json.dumps(ending))
    if lost:
        ending = {"status": Status.KILLED, "error": LOST}
        for path in sorted(run_folder.glob("rank-*.json"))[:1]:
            ending = json.loads(path.read_text())
    return replace(record, status=Status(ending["status"]), error=ending["error"])
