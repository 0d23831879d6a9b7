"""One run on several ranks: each executes the recipe on its part of the batch, and the first keeps the record."""

import json
import signal
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from workbench.base.categories import Category
from workbench.base.patches import change_environment
from workbench.journal import store
from workbench.journal.record import Record, Status
from workbench.measure.meter import MemoryReport, Meter
from workbench.recipe import Recipe
from workbench.training.job import Job, prepare
from workbench.training.ongoing import OngoingRun
from workbench.training.ranks import zero
from workbench.training.ranks.shard import ResizableTracker, find_gathered_weights, gather_shards, mesh_of, shard_fully
from workbench.training.ranks.shards import Ranks
from workbench.training.ranks.world import broadcast_from_first, gather_from_all, join
from workbench.training.run import execute_or_raise
from workbench.training.trainer import MeteredTrainer

MEMORY = [field.name for field in fields(MemoryReport)]
# Fields that the record has of each rank.
RANK_FIELDS = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_phase", "by_category")
# Fields whose sum over the ranks is the run's.
SUMMED = ("tokens_seen", "padding_tokens", "tokens_per_s")
LOST = "another rank ended without a word"


class RankMeter(Meter):
    """The meter of one rank. Weights that are gathered from all ranks count as weights, as long as they are whole.

    Attributes:
        others: returns the tensors that an engine keeps beside the model, by category.
        buckets: DDP's buckets of gradients, by their numbers; they live as long as the Trainer's model.
    """

    tracker_kind = ResizableTracker

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.others: Callable[[], Mapping[Category, list[torch.Tensor]]] = dict
        self.buckets: dict[int, weakref.ref[torch.Tensor]] = {}
        parameter: Any = next(model.parameters(), None)
        if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
            # The rank's part of the model waits on the host, and is moved to this device to compute.
            options["device"] = torch.device(parameter.device_mesh.device_type)
        super().__init__(model, **options)

    def _tensors_by_category(self) -> dict[Category, list[torch.Tensor]]:
        tensors = super()._tensors_by_category()
        tensors[Category.WEIGHTS] += find_gathered_weights(self._model)
        for reference in self.buckets.values():
            bucket = reference()
            if bucket is not None:
                tensors[Category.GRADIENTS].append(bucket)
        for category, others in self.others().items():
            tensors[category] += others
        return tensors

    def label_now(self) -> None:
        """Label tensors within a phase, which will be gone when it ends."""
        if self._is_tracking:
            self._label_tensors()


class RankRun(OngoingRun):
    """A run on one of several ranks. All ranks exchange messages in the same order, or they would wait for each
    other."""

    meter_kind = RankMeter

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.ranks = Ranks(job.world.world_size, job.world.shard)
        self.trainer_kind = zero.trainer_of(job.world.shard)

    # ---- the record, which the first rank keeps ----

    def begin(self) -> None:
        begun = broadcast_from_first(partial(store.begin, self.record, self.job.folder))
        self.record = replace(begun, rank=self.record.rank)

    def write_progress(self) -> None:
        if self.record.rank == 0:
            super().write_progress()

    def end(self) -> Record:
        """Write the one record, and return it: the peak is the highest of all ranks' and `ranks` has each; or why the
        run failed."""
        with suppress(OSError):
            if self.record.status in (Status.OK, Status.DIVERGED):
                self.record = combine_ranks(self.record)
            elif self.record.status is not Status.UNAVAILABLE:
                self.record = add_reason(self.record, self.folder, self.error)
        if self.record.rank == 0:
            super().end()
        return self.record

    # ---- the model, of which a rank may keep a part ----

    def move_to_device(self, model: PreTrainedModel) -> PreTrainedModel:
        return part_of(model, self.ranks, self.job.device.kind)

    def model_facts(self, model: PreTrainedModel, trainer: MeteredTrainer) -> dict[str, Any]:
        facts = super().model_facts(model, trainer)
        facts["dtype"] = getattr(trainer, "dtype", facts["dtype"])
        return facts

    def save(self, model: PreTrainedModel) -> None:
        """Write the fine-tuned model, on the first rank. Where the model is sharded, that rank loads another one into
        host memory, and fills it with the weights of all."""
        if self.job.save is None:
            return
        is_zero = self.ranks.engine == "deepspeed"
        weights = zero.gather_weights(model) if is_zero else gather_shards(model.state_dict())
        if self.record.rank != 0:
            return
        if self.ranks.engine != "ddp":
            model = self.behaviour.load(self.job)
            model.load_state_dict(weights)
        super().save(model)


def part_of(model: PreTrainedModel, ranks: Ranks, device_kind: str) -> PreTrainedModel:
    """Return a model of which this rank keeps its part, on the device or on the host: the way to shard decides
    that. Where weights are not cut, as under DDP, a rank keeps all of it."""
    if ranks.engine == "fsdp":
        return shard_fully(model, ranks.shard, mesh_of(device_kind, ranks.count))
    if ranks.engine == "deepspeed":
        model = zero.partition(model, ranks.shard)
    return model.to(device_kind)  # type: ignore[arg-type, no-any-return]  # the stub takes no device


def run_as_rank(
    recipe: Recipe,
    *,
    shard: str,
    device: str | None,
    folder: Path,
    **options: Any,
) -> Record:
    """Do what `workbench.run` does, in a process that `run_on_ranks` has started as one of several ranks.

    The ranks share the effective batch, and losses are those of one process, up to rounding. The first rank writes the
    one record: its memory is that of the rank with the highest peak, `ranks` has them all. Raises as `run` does.

    Args:
        shard: what each rank keeps, a name of `shards.toml`.
        options: those of the gate.
    """
    signal.signal(signal.SIGTERM, end_this_rank)
    # A program that runs several recipes, one after the other, keeps its process group.
    was_joined = dist.is_initialized()
    try:
        with change_environment():  # joining adds variables
            world = join(device, shard)
            if Ranks(world.world_size, shard).engine == "deepspeed":
                zero.set_accelerator(world.device.kind)
            record = execute_or_raise(RankRun(prepare(recipe, world, folder=folder, **options)))
        # gloo's threads let go of what they have sent; they could not while the group is destroyed.
        dist.barrier()
        return record
    finally:
        zero.close_engines()
        if not was_joined and dist.is_initialized():
            dist.destroy_process_group()


def end_this_rank(*_: Any) -> None:
    """End this rank, as the launcher asks of those that are left when one has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # asked twice, it still ends its record
    raise SystemExit(LOST)


def is_lost(error: BaseException | None) -> bool:
    """Whether this rank ended because another one had ended."""
    return isinstance(error, SystemExit) or any(word in str(error) for word in ("gloo", "NCCL", "Connection"))


def combine_ranks(record: Record) -> Record:
    """Return this rank's record with what all ranks have measured."""
    ranks = gather_from_all({name: getattr(record, name) for name in (*MEMORY, *SUMMED)})
    highest = max(ranks, key=lambda facts: facts["peak_allocated_bytes"])
    of_all: dict[str, Any] = {name: highest[name] for name in MEMORY}
    for name in SUMMED:
        values = [facts[name] for facts in ranks]
        if None not in values:
            of_all[name] = sum(values)
    of_each = []
    for rank, facts in enumerate(ranks):
        of_each.append({"rank": rank, **{name: facts[name] for name in RANK_FIELDS}})
    return replace(record, **of_all, ranks=of_each)


def add_reason(record: Record, run_folder: Path, error: BaseException | None) -> Record:
    """Return this rank's record with what went wrong: with this rank, or, if it ended only because another one
    was lost, with that one.

    The ranks cannot exchange messages any more, so each but the first, which keeps the record, leaves its reason in a
    file of the run's folder.
    """
    ending = {"status": record.status, "error": f"rank {record.rank}: {record.error}"}
    if is_lost(error):
        ending = {"status": Status.KILLED, "error": LOST}
        for path in sorted(run_folder.glob("rank-*.json"))[:1]:
            ending = json.loads(path.read_text())
    elif record.rank != 0:
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / f"rank-{record.rank}.json").write_text(json.dumps(ending))
    return replace(record, status=Status(ending["status"]), error=ending["error"])
